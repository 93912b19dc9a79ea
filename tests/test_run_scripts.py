"""The shell scripts in run/ that install, start the first lesson and run the tests."""

import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, lesson_path, one_line
from lessons import LESSONS


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout, without its environment and data."""
    ignore = shutil.ignore_patterns(".venv", ".git", "data", "__pycache__", "checkpoints")
    return shutil.copytree(ROOT, tmp_path / "a checkout", ignore=ignore)


def script(name, *flags, **env):
    """Run a script as a user does, from another folder."""
    command = ["bash", name, *flags]
    return subprocess.run(command, cwd="/", env=os.environ | env, capture_output=True, text=True)


def write_program(path, text):
    """Write a shell script that stands for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def ready(checkout):
    """The checkout after the installation, with a Python that prints its words, or its GPUs."""
    write_program(checkout / ".venv" / "bin" / "python", '[ "$1" = -W ] && echo $GPUS || echo "$*"')
    for name in ("requirements.txt", "tests/requirements.txt"):
        copy = checkout / ".venv" / "installed" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, copy)
    return checkout


def test_what_cannot_be_installed_is_one_clear_line(checkout):
    """It has the reason: no Python, an old one, or a missing package. The next run tries again."""
    quickstart = checkout / "run" / "quickstart.sh"
    for python in ("/no/such/python", "/bin/false"):
        done = script(quickstart, PYTHON=python)
        assert done.returncode == 1
        one_line(done, "no Python 3.11 or newer was found", "PYTHON=")
    assert not (checkout / ".venv").exists()
    (checkout / "requirements.txt").write_text("./no-such-package\n")
    done = script(quickstart)
    assert (done.returncode, done.stdout) == (1, "")
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "no-such-package" in error
    assert not (checkout / ".venv" / "installed").exists()


PIP = """
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [ "$2" = pip ]; then shift 4 && echo "pip $*"; fi
"""


def installed(done):
    """Return the flags of pip, for which PIP stands, from the output of run/setup.sh."""
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = done.stderr.splitlines()
    return [line.removeprefix("pip ") for line in lines if line.startswith("pip ")]


def test_what_is_installed_when(checkout, tmp_path):
    """The lessons do without what only the tests need, and nothing is installed twice.

    TORCH_INDEX_URL is where torch and torchvision come from, and nothing else.
    """
    write_program(tmp_path / "python", PIP)
    pip = {"PYTHON": str(tmp_path / "python")}
    setup = checkout / "run" / "setup.sh"
    tests = "tests/requirements.txt"
    assert installed(script(setup, **pip)) == ["-r requirements.txt"]
    assert installed(script(setup, tests, **pip)) == [f"-r {tests}"]
    assert installed(script(setup, tests, **pip)) == []
    (checkout / "requirements.txt").write_text("torch\n")
    done = script(setup, tests, TORCH_INDEX_URL="https://an.index/cpu", **pip)
    torch, rest = installed(done)
    assert torch.endswith("/torch.txt --index-url https://an.index/cpu")
    assert rest == "-r requirements.txt"


def test_which_tests(ready):
    """run/test.sh runs the quick tests, all, or what is given."""
    for words, where, flags in (
        ("", "tests ", " -m quick"),
        ("--all -x", "tests ", " -x"),
        ("tests/test_data.py -x", "", " tests/test_data.py -x"),
        ("-k parity", "tests ", " -k parity"),
    ):
        done = script(ready / "run" / "test.sh", *words.split())
        assert done.stdout == f"-m pytest {where}-n 4 --dist worksteal{flags}\n", done.stderr


def test_quickstart_counts_the_gpus_that_torch_can_use(ready, tmp_path):
    """With fewer than two it uses the CPU. What nvidia-smi lists does not count.

    Nothing is installed a second time, and the lesson gets the flags.
    """
    write_program(tmp_path / "fakes" / "nvidia-smi", "for gpu in 0 1 2 3; do echo GPU $gpu; done")
    path = f"{tmp_path / 'fakes'}:{os.environ['PATH']}"
    for gpus, device in (("1", "--device cpu "), ("2", "")):
        done = script(ready / "run" / "quickstart.sh", "--epochs", "1", GPUS=gpus, PATH=path)
        command = f"playground/distributed_data_parallel.py -g 2 {device}--epochs 1\n"
        assert done.stdout == command, done.stderr
        assert "Installing" not in done.stderr


ON_GPUS = """#!/bin/sh
case "$*" in
*is_available*) echo "| GPUs | 2 of them |" ;;
*fetch*) echo digits ;;
*single_gpu.py*) echo "epoch 5/5  loss 1.5  0.01 s  1,234 images/s" ;;
*bare.py*) printf '0.02 s  %s images/s\\n' 999 1,300 998 ;;
*pytest*)
    echo "4 workers [3 items]"
    echo "[gw0] [ 33%] PASSED test_gpu.py::test_a"
    echo "[gw1] [ 66%] FAILED test_gpu.py::test_b[ddp --model cnn-2]"
    exec sleep 600 ;;
esac
"""


def test_a_page_about_gpus(checkout):
    """run/gpu.sh writes it in time. Without a GPU it ends in one line."""
    done = script(checkout / "run" / "gpu.sh", PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "PyTorch finds no GPU" in done.stderr
    python = checkout / "python"
    python.write_text(ON_GPUS)
    python.chmod(0o755)
    done = script(checkout / "run" / "gpu.sh", PYTHON=str(python), LIMIT="1")
    assert done.returncode == 1, done.stderr
    page = (checkout / "gpu.md").read_text()
    for row in (
        "| GPUs | 2 of them |",
        "| single_gpu.py on digits | 1234 images/s |",
        "| a bare loop on digits | 1300 images/s |",
        "| tests in test_gpu.py | 3 |",
        "| passed | 1 |",
        "| failed | 1 |",
        "The tests were interrupted after 1 s.",
        "- FAILED: `test_gpu.py::test_b[ddp --model cnn-2]`",
    ):
        assert f"{row}\n" in page, page


def kind(path):
    """Return how a lesson's ranks can be started, as the scripts see it: itself, launcher."""
    ask = 'source run/lesson.sh; ! spawns "$1" || echo itself; ! takes_rank "$1" || echo launcher'
    command = ["bash", "-c", ask, "", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.split()


def test_the_kind_of_each_lesson():
    """A lesson starts its ranks itself, or a launcher starts them, or both, or it has none."""
    single = {"single_gpu", "data_parallel", "model_parallel"}
    both = {"blocking_p2p", "nonblocking_p2p", "collectives"}
    spawning = {
        "manual_data_parallel",
        "overlapped_data_parallel",
        "distributed_data_parallel",
        "distributed_data_parallel2",
    }
    for lesson in LESSONS:
        expected = []
        if lesson in both | spawning:
            expected.append("itself")
        if lesson not in single | spawning:
            expected.append("launcher")
        assert kind(lesson_path(lesson)) == expected, lesson


def test_the_kind_of_a_lesson_depends_on_its_code(tmp_path):
    """An import, a comment or a docstring does not count."""
    for text, expected in (
        ("    ranks = mp.spawn(train, join=False)", ["itself"]),
        ("from detectron2.engine import launch\ndef launch(train):", []),
        ('"""What mp.spawn( and launch( do, and init_process_group()."""\n# mp.spawn(train)', []),
        ("torch.distributed.init_process_group()", ["launcher"]),
        ("init_process_group()\nlaunch(train, 2)", ["itself"]),
        ("rank = os.environ['RANK']", ["launcher"]),
    ):
        (tmp_path / "a lesson.py").write_text(f"{text}\n")
        assert kind(tmp_path / "a lesson.py") == expected


def test_the_scripts_are_executable():
    """In a fresh clone, the files that begin with #! can be run by name, and no others."""
    for path in [*(ROOT / "run").iterdir(), ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK) == path.read_text().startswith("#!"), path
