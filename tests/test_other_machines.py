"""The workflow that runs the tests elsewhere, and what runs on a machine that is not Linux."""

import re
import sys

from launch import SHORT, Job, epochs, one_process, run
from lessons import ROOT, lesson_path

WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"


def test_the_oldest_pytorch():
    """CI runs the quick tests with the oldest PyTorch that requirements.txt allows."""
    oldest = (ROOT / "tests" / "oldest.txt").read_text()
    requirements = (ROOT / "requirements.txt").read_text()
    assert "tests/oldest.txt" in WORKFLOW.read_text()
    for name in ("torch", "torchvision"):
        version = re.search(rf"^{name}==([\d.]+)", oldest, re.M)[1]
        lowest = re.search(rf"^{name}>=([\d.]+)", requirements, re.M)[1]
        assert version == lowest or version.startswith(f"{lowest}.")


# Python imports this first, in each process. On macOS it has a module _scproxy, and PyTorch comes
# without triton.
SITECUSTOMIZE = """
import os
import sys
import types

import psutil  # which has other ways on macOS


def refuse(event, arguments):
    if event == "os.fork":
        raise OSError("no process is forked here")
    if event not in ("open", "os.listdir", "os.scandir"):
        return
    caller = sys._getframe().f_back
    by_psutil = caller and "psutil" in caller.f_code.co_filename
    if str(arguments[0]).startswith("/proc") and not by_psutil:
        raise FileNotFoundError(arguments[0])


sys.addaudithook(refuse)
del os.sched_getaffinity
sys.platform = "darwin"
proxies = types.ModuleType("_scproxy")
proxies._get_proxies = proxies._get_proxy_settings = dict
sys.modules |= {"_scproxy": proxies, "triton": None}
"""


def test_nothing_needs_what_only_linux_has(tmp_path):
    """Two lessons, watch.py and a check, where Python says that it is on macOS.

    There is no /proc, no process can be forked, and folders are links, as /tmp is on macOS.
    """
    (tmp_path / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (tmp_path / "real").mkdir()
    (tmp_path / "temporary").symlink_to("real")
    (tmp_path / "course").symlink_to(ROOT)
    here = {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path / "temporary")}
    playground = tmp_path / "course" / "playground"
    forks = Job(sys.executable, "-c", "import os; os.fork()", env=here).wait()
    assert "no process is forked here" in forks.stderr
    lesson = playground / "blocking_p2p.py"
    watched = run(playground / "tools" / "watch.py", lesson, env=here, cold=True)
    assert "rank 1 has [0.0, 1.0, 2.0, 3.0] and waited " in watched.stdout
    assert re.search(r"^0 .* send .* \d+: dist.send\(", watched.stdout, re.M)
    # Here the same is hidden after PyTorch is imported.
    text = lesson_path("fully_sharded_data_parallel").read_text()
    copy = tmp_path / "fully_sharded_data_parallel.py"
    copy.write_text(text.replace("\nsys.path.", f"{SITECUSTOMIZE}\nsys.path.", 1))
    assert epochs(run(copy, *SHORT, processes=2).stdout) == one_process(*SHORT)
    exercises = playground / "exercises"
    solution = exercises / "judging" / "checks" / "ring_all_reduce.py"
    flags = ("ring_all_reduce", "--file", solution, "--ranks", 1)
    checked = run(exercises / "check.py", *flags, env=here, cold=True)
    assert checked.stdout == "RIGHT with 1 rank\n"
