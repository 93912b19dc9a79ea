"""compare.py: its numbers are the lessons' own, a failure is a row, Ctrl-C keeps what there is; and known answers.

Most of its lessons are forked here, as it is itself (see warm.py). `test_a_cold_start` and README's command start them.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import sys
import time

import matplotlib.image
import pytest
from conftest import DIGITS, ROOT, Lesson, alive, by_torchrun, epochs, one_process

from playground.compare import LESSONS, PASSED_ON, TORCHRUN, by_width, execute, fitting, plan
from playground.measure.figures import draw_widths
from playground.measure.processes import follow, messages
from playground.measure.report import tell_widths

SHORT = (*DIGITS, "--batch_size", 120)


def compare(out, *flags, path="compare", status=0):
    """Run compare.py to its end. Returns what it printed and its results."""
    done = Lesson(path, *SHORT, "--out", out, *flags).wait()
    assert done.returncode == status, done.stdout + done.stderr
    return done, json.loads((out / "results.json").read_text())


def drawn(path):
    """Whether a file is an image that is not of one colour."""
    pixels = matplotlib.image.imread(path)
    return min(pixels.shape[:2]) > 200 and float(pixels[..., :3].std()) > 0.01


@pytest.fixture
def course(tmp_path):
    """A copy of the lessons, to break."""
    for folder in ("playground", "common"):
        shutil.copytree(ROOT / folder, tmp_path / "course" / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "course" / "playground"


def test_the_numbers_are_the_lessons_own(tmp_path):
    """Parity, speed and steps of real runs; two agree in float64 though they don't in float32."""
    flags = ("--epochs", 2, "--only", "parity", "steps", "--lessons", "distributed_data_parallel_torchrun")
    done, results = compare(tmp_path, *flags)
    one, ddp, *double, by_ddp, each, bucket = results["runs"]
    ours = "distributed_data_parallel_torchrun.py, 2 processes"
    assert [run["name"] for run in (one, ddp)] == [run["name"] for run in double] == ["single_gpu.py", ours]
    for run in (one, ddp):
        said = epochs((tmp_path / "runs" / run["folder"][-2:] / "out.txt").read_text())
        assert [{name: epoch[name] for name in ("loss", "train", "test")} for epoch in run["epochs"]] == said
        assert run["loss"] == said[-1]["loss"]
        assert run["images_per_s"] == run["epochs"][1]["images_per_s"] > 0
        assert 0 < run["start_up_s"] == run["epochs"][0]["at"] - run["epochs"][0]["seconds"]
        assert 200 < run["memory_mib"] < 5000
        assert run["name"] in done.stdout
    assert all(len(run["epochs"]) == 1 and "--double" in run["command"] for run in double)
    assert one["difference_float32"] == one["difference_float64"] == 0
    assert 0 < ddp["difference_float64"] < 1e-12 < ddp["difference_float32"] < 1e-3
    assert "1 of 1 end with single_gpu.py's loss" in done.stdout and "nothing else" in done.stdout
    for run, average in ((by_ddp, "ddp"), (each, "each"), (bucket, "bucket")):
        assert run["name"] == f"profile_steps.py --average {average}, 2 processes"
        assert run["step"] == pytest.approx(run["data"] + run["compute"] + run["exposed"])
        assert min(run["data"], run["compute"], run["exposed"]) > 0
        assert 0 <= run["hidden"] <= run["compute"]
    assert drawn(tmp_path / "speed.png") and drawn(tmp_path / "steps.png")
    assert not results["interrupted"]


def test_a_cold_start(tmp_path):
    """Start-up time, numbers and memory of ranks that torchrun starts from the command line."""
    flags = {"dataset": "digits", "device": "cpu", "batch_size": 120, "epochs": 2}
    args = argparse.Namespace(**dict.fromkeys(PASSED_ON) | flags, timeout=300)
    ours = {"lesson": "distributed_data_parallel_torchrun", "words": [], "ranks": 2}
    execute(ours, args, tmp_path / "01")
    assert not ours["failed"], ours
    assert {name: ours[name] for name in ("loss", "train", "test")} == one_process(*SHORT, "--epochs", 2)[-1]
    assert 0.5 < ours["start_up_s"] < ours["epochs"][0]["at"]
    assert 200 < ours["memory_mib"] < 5000


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_sizes_that_fit(gpus, model):
    """On 1 to 8 GPUs: each stage has a layer with weights, each piece as many neurons; the batch fits all."""
    stages, pieces, batch_size = fitting(gpus, [gpus, 8], model, None, None, 128)
    assert stages == min(gpus, 4)
    assert pieces == {3: 2, 5: 4, 6: 4, 7: 4}.get(gpus, gpus)
    assert batch_size % gpus == batch_size % 8 == 0 and 104 <= batch_size <= 152
    stages, narrow, _ = fitting(gpus, [gpus], model, 100, gpus, 128)
    assert stages == gpus and narrow == min(pieces, 4)  # as many hidden layers are enough
    assert fitting(gpus, [gpus], model, 33, None, 128)[1] == 1


def test_how_lessons_are_started():
    """By torchrun what takes its place from the environment; the pipeline with the stages that it can have."""
    assert set(TORCHRUN) == {name for name in (*(words.split()[0] for words in LESSONS), "profile_steps")
                             if by_torchrun(name)}  # fmt: skip
    args = {"gpus": 6, "stages": 3, "pieces": 4, "processes": [1, 6], "widths": [64], "device": "cuda", "width": None}
    args |= {"batch_size": 120, "only": ["parity", "scaling"]}
    lessons = ["pipeline_parallel", "manual_sharding", "tensor_parallel", "hybrid_parallel"]
    runs = plan(argparse.Namespace(**args, lessons=lessons))
    names = ["single_gpu.py", "pipeline_parallel.py, 3 processes"]
    names += [f"manual_sharding.py --stage {stage}, 6 processes" for stage in (2, 3)]
    names += ["tensor_parallel.py, 4 processes", "tensor_parallel.py --by dtensor, 4 processes"]
    names += ["hybrid_parallel.py --mesh 3x2, 6 processes"]
    scaling = [f"distributed_data_parallel.py -g {count}" for count in ("1", "6", "6 --batch_size 720")]
    assert [run["name"] for run in runs] == 2 * names + scaling
    assert [run["lesson"] for run in runs if "--compare" in run.get("flags", [])] == ["tensor_parallel"] * 2


@pytest.mark.parametrize(
    ("device", "gpus", "width", "mesh"),
    [
        ("cpu", 1, None, "2x2"),
        ("cpu", 2, 64, "2x2"),
        ("cpu", 2, 33, "4x1"),
        ("cpu", 5, None, "5x1"),
        ("cuda", 1, None, "1x1"),
        ("cuda", 2, None, "1x2"),
        ("cuda", 8, 120, "4x2"),
        ("cuda", 7, 120, "7x1"),
    ],
)
def test_the_mesh(device, gpus, width, mesh):
    """Two columns where ranks and neurons are even, no more ranks than GPUs, and four on a CPU."""
    args = {"gpus": gpus, "stages": 1, "pieces": 1, "processes": [1], "widths": [], "device": device, "width": width}
    run = plan(argparse.Namespace(**args, batch_size=120, only=["parity"], lessons=["hybrid_parallel"]))[1]
    assert run["words"] == ["--mesh", mesh] and run["ranks"] == math.prod(map(int, mesh.split("x")))


@pytest.mark.parametrize(
    ("said", "counted"),
    [
        ("messages in a step: 16 all_gather and 8 reduce_scatter; DDP: 1 all_reduce for each bucket", (16, 8, 0)),
        ("messages of a step: 8 all_gather, 4 reduce_scatter, 0 all_reduce. DDP: an all_reduce", (8, 4, 0)),
        ("all_reduce in forward: 2, in backward: 1  (predicted: 2 and 1, one for each pair)", (0, 0, 3)),
        ("tp    all_reduce      3        4  35,328\ndp    all_gather      8        9  118,568", (8, 0, 3)),
        ("epoch 1/2  loss 1.4064  train 72.43%  test 85.19%  0.52 s  115,200 images/s", (0, 0, 0)),
    ],
)
def test_messages_that_lessons_count(said, counted, tmp_path):
    """In each of their ways to say it, without what they say of DDP, and without predictions."""
    (tmp_path / "out.txt").write_text(f"{said}\n")
    of = {kind: int(count) for count, kind in (words.split() for words in messages(tmp_path).split(", ") if words)}
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    assert of == {kind: count for kind, count in zip(kinds, counted, strict=True) if count}


def test_lessons_that_share_a_model_out(tmp_path):
    """Each ends with one process's weights, and its row has the messages that it has counted itself."""
    lessons = ("fully_sharded_data_parallel", "tensor_parallel")
    done, results = compare(tmp_path, "--epochs", 1, "--only", "parity", "--lessons", *lessons)
    one, *runs = [run for run in results["runs"] if run["kind"] == "float32"]
    counted = ["8 all_gather, 4 reduce_scatter", "3 all_reduce", "3 all_reduce"]  # the last two in float64 only
    assert "messages" not in one and [run.get("messages") for run in runs] == counted
    assert all(run["difference_float64"] < 1e-12 for run in runs)
    assert "3 of 3 end with single_gpu.py's loss" in done.stdout


def test_memory_is_of_before_a_checkpoint(tmp_path):
    """What a lesson takes after its first epoch line does not count."""
    code = """import time
time.sleep(0.5)
print("epoch 1/1  loss 1.0  train 1.00%  test 1.00%  0.50 s  100 images/s", flush=True)
large = bytearray(300 * 2**20)
time.sleep(0.5)
"""
    status, said, memory = follow([sys.executable, "-c", code], {}, tmp_path, 60)
    assert status == 0 and len(said) == 1
    assert 5 < memory < 100


def test_scaling_on_one_core(course, tmp_path):
    """More processes than cores are marked, and a line says that it can't get faster."""
    path = course / "compare.py"
    one_core = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    path.write_text(one_core + path.read_text())
    done, results = compare(tmp_path, "--epochs", 1, "--only", "scaling", path=path)
    one, strong, weak = results["runs"]
    assert [run["processes"] for run in (one, strong, weak)] == [1, 2, 2]
    assert "--batch_size=120" in one["command"] and "--batch_size 240" in weak["command"]
    for run in (strong, weak):
        assert run["speed_up"] == pytest.approx(run["images_per_s"] / one["images_per_s"])
        assert run["efficiency"] == pytest.approx(run["speed_up"] / 2)
        assert run["note"] == "more processes than cores"
    assert all(run["variables"] == {"OMP_NUM_THREADS": "1"} for run in results["runs"])
    assert "nothing can get faster here" in done.stdout
    assert drawn(tmp_path / "scaling.png")


@pytest.mark.parametrize(
    ("several", "where"),
    [
        ((5, 6, 7), "not within these widths"),
        ((5, 9, 11), "between the widths 64 and 256"),
        ((12, 12, 12), "at the first width, 64, or before"),
    ],
)
def test_where_ddp_starts_to_pay(several, where, tmp_path, capsys):
    """From made-up runs, one of which has failed: the row, the sentence and the figure."""
    args = argparse.Namespace(widths=[64, 256, 1024], gpus=2)
    runs = [{"kind": "one", "width": width, "images_per_s": 8} for width in args.widths]
    runs += [{"kind": "several", "width": w, "images_per_s": n} for w, n in zip(args.widths, several, strict=True)]
    runs += [{"kind": "traced", "width": 64, "exposed": 3, "step": 4}, {"kind": "traced", "width": 256, "note": "oh"}]
    rows = by_width(runs, args)
    assert rows[0] == {"width": 64, "one": 8, "several": several[0], "messages": 0.75, "note": ""}
    assert (rows[1]["messages"], rows[1]["note"]) == (None, "oh")
    tell_widths(rows, args)
    assert f"DDP starts to pay: {where}." in capsys.readouterr().out
    draw_widths(rows, tmp_path / "widths.png")
    assert drawn(tmp_path / "widths.png")


def test_what_fails_is_a_row(course, tmp_path):
    """Three broken lessons and a missing package: the others go on. Status 1 names the first three only."""
    (course / "data_parallel.py").write_text("import sys\nsys.exit('error: broken | on purpose')\n")
    torchrun = (course / "distributed_data_parallel_torchrun.py").read_text()
    (course / "distributed_data_parallel_torchrun.py").write_text(torchrun.replace("optimizer.step()", "1 / 0"))
    (course / "pipeline_parallel.py").write_text("print('nothing')\n")
    (course / "distributed_data_parallel2.py").write_text("raise SystemExit('error: x is missing: pip install x')\n")
    torchrun = "distributed_data_parallel_torchrun"
    lessons = ("data_parallel", "distributed_data_parallel2", torchrun, "pipeline_parallel")
    flags = ("--epochs", 1, "--only", "parity", "--lessons", *lessons)
    done, results = compare(tmp_path, *flags, path=course / "compare.py", status=1)
    runs = {run["name"]: run for run in results["runs"]}
    assert not runs["single_gpu.py"]["failed"]
    assert "| error: broken / on purpose |" in done.stdout
    assert runs["pipeline_parallel.py, 2 processes"]["note"] == "no epoch line, exit status 0"
    assert runs[f"{torchrun}.py, 2 processes"]["note"].endswith("ZeroDivisionError: division by zero")
    assert len(results["runs"]) == len(runs) + 1  # what has failed is not run again in float64
    assert runs["distributed_data_parallel2.py -g 2"]["note"] == "error: x is missing: pip install x"
    assert "There are no two lessons" in done.stdout
    names = f"data_parallel.py; {torchrun}.py, 2 processes; pipeline_parallel.py, 2 processes"
    assert done.stderr.strip() == f"error: failed: {names}"


def test_a_lesson_that_hangs(course, tmp_path, monkeypatch):
    """It is ended after --timeout, with the process that it has started, and the note says so."""
    monkeypatch.setattr("playground.compare.__file__", str(course / "compare.py"))
    start = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', '"
    (course / "single_gpu.py").write_text(
        start + "import os, time; print(os.getpid(), flush=True); time.sleep(999)'])\n"
    )
    args = argparse.Namespace(**dict.fromkeys(PASSED_ON), timeout=3)
    execute(run := {"lesson": "single_gpu", "words": []}, args, tmp_path / "01")
    assert run["failed"] and run["note"] == "took longer than 3 s: give it more with --timeout"
    if pid := (tmp_path / "01" / "out.txt").read_text().strip():  # a busy machine may not come so far
        end = time.monotonic() + 30
        while alive(pid) and time.monotonic() < end:  # killed, but the kernel may still be at it
            time.sleep(0.1)
        assert not alive(pid)


def test_ctrl_c_keeps_what_there_is(tmp_path):
    """The first lesson is in the results. No process is left, though torchrun puts its ranks into other sessions."""
    flags = ("--epochs", 400, "--only", "parity", "--lessons", "distributed_data_parallel_torchrun")
    job = Lesson("compare", *SHORT, "--out", tmp_path, *flags)
    printed = tmp_path / "runs" / "02" / "out.txt"
    end = time.monotonic() + 200
    while not (printed.exists() and "epoch 1/" in printed.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == f"interrupted: wrote what there is to {tmp_path}"
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["interrupted"]
    assert [run["name"] for run in results["runs"]] == ["single_gpu.py"]
    assert "| single_gpu.py |" in re.sub(" +", " ", done.stdout)
    assert drawn(tmp_path / "speed.png")


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--out", "/proc/nowhere"), "can't write --out /proc/nowhere"),
        (("--widths", "0"), "must be 1 or more"),
        (("--batch_size", 100), "can't be cut into [1, 2, 8] equal parts: use 96"),
        (("--lr", "nan"), "--lr nan: must be a number"),
    ],
)
def test_bad_input(flags, told, main):
    """Status 2 and one line, before anything is run."""
    done = main("compare", *SHORT, "--processes", 2, *flags)
    assert told in done.stderr and len(done.stderr.splitlines()) == 1
