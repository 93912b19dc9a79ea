"""bench.py: its numbers are the lessons' own, a failure is a row, and no process is left behind.

Short scripts stand for most lessons.
"""

import os
import signal
import sys

import bench
import pytest
from launch import SHORT, Lesson, alive, run, single_gpu
from nodes import until

from instruments import runs

EPOCHS = """import sys
for epoch, speed in enumerate({speeds}, start=1):
    numbers = f"train 72.43%  test 85.19%  0.50 s  {{speed:,}} images/s"
    print(f"epoch {{epoch}}/3  loss {{1.5 / epoch:.4f}}  {{numbers}}", flush=True)
"""


def table(text):
    """Return the rows of a Markdown table as dicts."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.fixture
def benched(tmp_path, monkeypatch, capsys):
    """A function that runs bench.py in this process, with scripts in place of the lessons."""

    def called(scripts, *flags):
        for name, code in scripts.items():
            (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(bench, "PLAYGROUND", tmp_path)
        monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, flags)])
        status = bench.main()
        return status, table(capsys.readouterr().out)

    return called


def test_two_lessons_have_the_same_losses():
    """One process and DDP, in float64."""
    flags = (*SHORT, "--double")
    name = "distributed_data_parallel_torchrun"
    done = run("bench", *flags, "--only", "single_gpu", name, cold=True)
    one, several = table(done.stdout)
    assert (one["lesson"], several["lesson"]) == ("single_gpu", f"torchrun 2 {name}")
    expected = single_gpu(*flags)[-1]
    for row in (one, several):
        assert float(row["loss"]) == pytest.approx(expected["loss"], abs=2e-12)
        assert 200 < float(row["MiB"].replace(",", "")) < 5000
    assert "MiB on a GPU" not in one


def test_what_fails_is_a_row(benched, monkeypatch):
    """It has the lesson's last words, and the status is 1."""
    scripts = {
        "good": EPOCHS.format(speeds=[5, 1000, 3000]),
        "broken": "raise SystemExit('error: broken on purpose')",
        "divides": "1 / 0",
        "silent": "",
    }
    monkeypatch.setattr(bench, "RUNS", [*scripts, "torchrun N broken"])
    # With one rank, because the words of two may end up in one line.
    status, [good, *failed] = benched(scripts, "-g", 1)
    assert status == 1
    assert (good["loss"], good["per s"], good["error"]) == ("0.5", "2,000", "")
    assert [row["error"] for row in failed] == [
        "error: broken on purpose",
        "ZeroDivisionError: division by zero",
        "status 0 without a word",
        "error: broken on purpose",
    ]
    assert failed[-1]["lesson"] == "torchrun 1 broken"
    assert benched(scripts, "--only", "good")[0] == 0


def test_the_lines_take_turns(benched, monkeypatch, tmp_path):
    """A row has the median of all its runs without their first epochs."""
    scripts = {name: f"open('turns', 'a').write('{name}')\n" for name in "ab"}
    scripts["a"] += EPOCHS.format(speeds=[1, 2000, 4000])
    scripts["b"] += EPOCHS.format(speeds=[9, 500, 700])
    monkeypatch.setattr(bench, "RUNS", [*scripts])
    status, rows = benched(scripts, "--repeats", 2)
    assert (status, [row["per s"] for row in rows]) == (0, ["3,000", "600"])
    assert (tmp_path / "turns").read_text() == "abab"


HANGS = """import subprocess
child = subprocess.Popen(["sleep", "999"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_run_that_hangs_is_ended():
    """So is what it has started, in whatever session."""
    done = runs.run(["python", "-c", HANGS], limit=5)
    assert done.status == -signal.SIGKILL
    assert done.last_words == "error: it took longer than 5 s"
    until(lambda: not alive(int(done.out)))


def test_ctrl_c_keeps_what_there_is(change):
    """The first lesson is in the table, and no process is left, though torchrun has sessions."""
    path = change("bench")
    started = path.parent / "started"
    wait = f"open({str(started)!r}, 'w')\nimport time\ntime.sleep(999)\n"
    (path.parents[1] / "single_gpu.py").write_text(EPOCHS.format(speeds=[1]))
    (path.parents[1] / "distributed_data_parallel_torchrun.py").write_text(wait)
    words = ("single_gpu", "distributed_data_parallel_torchrun")
    job = Lesson(path, "--only", *words, cold=True)
    until(started.exists)
    os.kill(job.process.pid, signal.SIGTERM)  # which is handled as Ctrl-C
    done = job.wait()
    assert done.returncode == 1
    assert [row["lesson"] for row in table(done.stdout)] == ["single_gpu"]


GPU = """class cuda:
    is_initialized = lambda: True
    device_count = lambda: 2
    max_memory_allocated = lambda index: (3 + index) * 2**20
"""


def test_the_memory_of_a_gpu(tmp_path):
    """It is that of the fullest GPU. (A module of the same name stands for PyTorch.)"""
    (tmp_path / "torch.py").write_text(GPU)
    (tmp_path / "lesson.py").write_text("import torch\n")
    assert runs.run(["python", str(tmp_path / "lesson.py")]).gpu_memory == 4
    assert runs.run(["python", "-c", "pass"]).gpu_memory == 0
