"""compare.py: its numbers are the lessons' own, a failure is a row, Ctrl-C keeps what there is.

Short scripts stand for most lessons here. test_devices.py checks that all of its runs fit any
number of GPUs.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time

import matplotlib.image
import pytest
from conftest import DIGITS, Lesson, epochs

from figures import compare as tool
from figures import processes
from figures.charts import draw_widths

SHORT = (*DIGITS, "--batch_size", 120)
TORCHRUN = "distributed_data_parallel_torchrun"
LESSON = """import sys
for epoch in (1, 2):
    loss = f"{1.5 / epoch:.{12 if '--double' in sys.argv else 4}f}"
    numbers = f"train 72.43%  test 85.19%  0.50 s  {epoch},000 images/s"
    print(f"epoch {epoch}/2  loss {loss}  {numbers}", flush=True)
"""


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """A function that runs compare.py in this process, with scripts in place of some lessons.

    It returns the status and the runs.
    """

    def compared(scripts, *flags):
        for name, code in scripts.items():
            (tmp_path / f"{name}.py").write_text(code)
            monkeypatch.setattr(tool, "PLAYGROUND", tmp_path)
        words = ["compare.py", *SHORT, "--epochs", 2, "--out", tmp_path / "out", *flags]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        status = tool.main()
        return status, json.loads((tmp_path / "out" / "results.json").read_text())["runs"]

    return compared


def drawn(path):
    """Return whether a file is an image that has more than one colour."""
    pixels = matplotlib.image.imread(path)
    return min(pixels.shape[:2]) > 150 and float(pixels[..., :3].std()) > 0.01


def test_the_numbers_are_the_lessons_own(compare, monkeypatch, tmp_path):
    """One process and the last run of the traced steps are run for real."""
    plan = tool.plan

    def first_and_last(args):
        one, *_, traced = plan(args)
        traced.ranks = 1  # a second rank takes long to start
        return [one, traced]

    monkeypatch.setattr(tool, "plan", first_and_last)
    flags = ("--only", "parity", "steps", "--lessons", "single_gpu")
    status, [one, traced] = compare({}, *flags)
    assert status == 0
    said = epochs((tmp_path / "out" / "runs" / "01" / "out.txt").read_text())
    names = ("loss", "train", "test")
    assert [{name: epoch[name] for name in names} for epoch in one["epochs"]] == said
    assert one["loss"] == said[1]["loss"]
    assert one["images_per_s"] == one["epochs"][1]["images_per_s"] > 0
    assert 0 < one["start_up_s"] == one["epochs"][0]["at"] - one["epochs"][0]["seconds"]
    assert 200 < one["memory_mib"] < 5000
    assert one["gpu_memory_mib"] is None
    assert traced["name"] == "profile_steps.py --average bucket, 2 processes"
    assert traced["step"] == pytest.approx(traced["data"] + traced["compute"] + traced["waiting"])
    assert min(traced["data"], traced["compute"], traced["waiting"]) > 0
    assert 0 <= traced["hidden"] <= traced["compute"]
    assert drawn(tmp_path / "out" / "steps.png")


def test_what_fails_is_a_row(compare, capsys):
    """Two lessons agree, three are broken, a package is missing: the status names the three."""
    missing = "error: x is missing: pip install x"
    scripts = {
        "single_gpu": LESSON,
        "overlapped_data_parallel": LESSON.replace("1.5", "1.500000000003"),
        "data_parallel": "1 / 0\n",
        "manual_data_parallel": "print('nothing')\n",
        "distributed_data_parallel2": f"raise SystemExit('{missing}')\n",
        TORCHRUN: "raise SystemExit('error: broken | on purpose')\n",
    }
    status, runs = compare(scripts, "--only", "parity", "--lessons", *scripts)
    out = capsys.readouterr().out
    notes = {run["name"]: run["note"] for run in runs if run["failed"]}
    nothing = "no epoch line, exit status 0"
    assert notes == {
        "data_parallel.py": "ZeroDivisionError: division by zero",
        "manual_data_parallel.py -g 2": nothing,
        "manual_data_parallel.py -g 2 --bucket": nothing,
        "distributed_data_parallel2.py -g 2": missing,
        f"{TORCHRUN}.py, 2 processes": "error: broken | on purpose",
    }
    assert "| error: broken / on purpose |" in out
    names = "data_parallel.py; manual_data_parallel.py -g 2; manual_data_parallel.py -g 2 --bucket"
    assert status == f"error: failed: {names}; {TORCHRUN}.py, 2 processes"
    one, other, *double = [run for run in runs if not run["failed"]]
    assert len(runs) == 9 and len(double) == 2  # what has failed is not run again in float64
    assert all("--double" in run["command"] for run in double)
    assert [one["images_per_s"], one["loss"], one["loss_float64"]] == [2000, 0.75, 0.75]
    assert "| 0.750000000000 |" in out
    assert one["difference"] == 0
    assert other["difference"] == pytest.approx(3e-12, rel=0.01)


GROWS = """import time
before = bytearray(100 * 2**20)
time.sleep(0.5)
print("epoch 1/1  loss 1.0  train 1.00%  test 1.00%  0.50 s  100 images/s", flush=True)
after = bytearray(300 * 2**20)
time.sleep(0.5)
"""


def test_memory(tmp_path):
    """The peak of a lesson until its end. An earlier run does not count."""
    larger = [sys.executable, "-c", "x = bytearray(600 * 2**20)"]
    subprocess.run(larger, check=True)
    words = [sys.executable, "-c", GROWS]
    status, said, memory = processes.follow(words, {}, tmp_path, 60)
    assert status == 0 and len(said) == 1
    assert 400 < memory < 550


def test_the_widths(tmp_path):
    """A row has both speeds, and the share of messages; what is not known is left out."""
    args = argparse.Namespace(widths=[64, 256])
    runs = [tool.Run("widths", "x", [], "traced", width=64, waiting=3, step=4)]
    runs.append(tool.Run("widths", "x", [], "traced", width=256, note="oh"))
    for width in args.widths:
        runs.append(tool.Run("widths", "x", [], "one", width=width, images_per_s=8))
        runs.append(tool.Run("widths", "x", [], "several", width=width, images_per_s=5))
    rows = tool.by_width(runs, args)
    assert rows[0] == {"width": 64, "one": 8, "several": 5, "messages": 0.75, "note": ""}
    assert (rows[1]["messages"], rows[1]["note"]) == (None, "oh")
    draw_widths(rows, tmp_path / "widths.png")
    assert drawn(tmp_path / "widths.png")


def test_ctrl_c_keeps_what_there_is(change, tmp_path):
    """The first lesson is in the results, and no process is left, though torchrun has sessions."""
    path = change("pages/figures/compare")
    (path.parents[2] / "single_gpu.py").write_text(LESSON)
    (path.parents[2] / f"{TORCHRUN}.py").write_text(f"{LESSON}import time\ntime.sleep(999)\n")
    out = tmp_path / "out"
    job = Lesson(path, *SHORT, "--out", out, "--only", "parity", "--lessons", TORCHRUN)
    printed = out / "runs" / "02" / "out.txt"
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if printed.exists() and "epoch 2/" in printed.read_text():
            break
        time.sleep(0.1)
    os.kill(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == f"interrupted: wrote what there is to {out}"
    results = json.loads((out / "results.json").read_text())
    assert results["interrupted"]
    assert [run["name"] for run in results["runs"]] == ["single_gpu.py"]
    assert "| single_gpu.py |" in re.sub(" +", " ", done.stdout)
