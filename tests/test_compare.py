"""compare.py: its numbers are the lessons' own, a failure is a row, Ctrl-C keeps what there is.

test_devices.py checks that all of its runs fit any number of GPUs.
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
from conftest import DIGITS, ROOT, Lesson, alive, epochs, lesson_path

from playground.figures import compare as tool
from playground.figures import processes, report
from playground.figures.charts import draw_scaling, draw_widths
from playground.figures.report import tell_parity, tell_speed, tell_widths

SHORT = (*DIGITS, "--batch_size", 120)


def compare(out, *flags, path="figures/compare", status=0):
    """Run compare.py to its end. Returns what it printed and its results."""
    done = Lesson(path, *SHORT, "--out", out, *flags).wait()
    assert done.returncode == status, done.stdout + done.stderr
    return done, json.loads((out / "results.json").read_text())


def drawn(path):
    """Return whether a file is an image that has more than one colour."""
    pixels = matplotlib.image.imread(path)
    return min(pixels.shape[:2]) > 150 and float(pixels[..., :3].std()) > 0.01


def test_the_numbers_are_the_lessons_own(tmp_path):
    """Parity, speed and steps of real runs. In float64, the same twelve digits are printed."""
    lesson = "distributed_data_parallel_torchrun"
    done, results = compare(
        tmp_path, "--epochs", 2, "--only", "parity", "steps", "--lessons", lesson
    )
    one, ddp, *double, by_ddp, each, bucket = results["runs"]
    names = ["single_gpu.py", f"{lesson}.py, 2 processes"]
    assert [run["name"] for run in (one, ddp)] == names
    assert [run["name"] for run in double] == names
    for run in (one, ddp):
        said = epochs((tmp_path / "runs" / run["folder"][-2:] / "out.txt").read_text())
        reported = []
        for epoch in run["epochs"]:
            reported.append({name: epoch[name] for name in ("loss", "train", "test")})
        assert reported == said
        assert run["loss"] == said[-1]["loss"]
        assert run["images_per_s"] == run["epochs"][1]["images_per_s"] > 0
        assert 0 < run["start_up_s"] == run["epochs"][0]["at"] - run["epochs"][0]["seconds"]
        assert 200 < run["memory_mib"] < 5000
        assert run["gpu_memory_mib"] is None
        assert run["name"] in done.stdout
    for run, in_float64 in zip((one, ddp), double, strict=True):
        assert "--double" in in_float64["command"] and len(in_float64["epochs"]) == 2
        assert run["loss_float64"] == in_float64["loss"]
        assert f"| {run['loss_float64']:.12f} |" in done.stdout
    assert one["difference"] == 0 <= ddp["difference"] < 1e-10
    assert "1 of 1 end with the loss of single_gpu.py" in done.stdout
    assert "only rounding differs" in done.stdout
    for run, average in ((by_ddp, "ddp"), (each, "each"), (bucket, "bucket")):
        assert run["name"] == f"profile_steps.py --average {average}, 2 processes"
        assert run["step"] == pytest.approx(run["data"] + run["compute"] + run["waiting"])
        assert min(run["data"], run["compute"], run["waiting"]) > 0
        assert 0 <= run["hidden"] <= run["compute"]
    assert drawn(tmp_path / "speed.png") and drawn(tmp_path / "steps.png")
    assert not results["interrupted"]


def test_sizes_that_fit():
    """Each stage has a layer, and each part of a layer as many neurons, or heads and tokens."""
    stages = [tool.fitting_stages(gpus, "mlp", layers) for gpus, layers in ((3, None), (8, None))]
    assert stages == [3, 4] and tool.fitting_stages(8, "mlp", 8) == 8
    pieces = [tool.fitting_pieces(7, "cnn", width) for width in (None, 100, 33)]
    assert pieces == [4, 4, 1] and tool.fitting_pieces(8, "mlp", None) == 8
    assert [tool.fitting_heads(gpus, None, None) for gpus in (1, 3, 8)] == [1, 2, 4]
    assert tool.fitting_heads(8, 3, 784) == 1
    assert tool.fitting_batch([6, 8], 128) == 120
    meshes = [tool.fitting_mesh("cpu", gpus, width) for gpus, width in ((1, None), (2, 33))]
    assert meshes == [(2, 2), (4, 1)]  # four ranks on any CPU
    meshes = [tool.fitting_mesh("cuda", gpus, 120) for gpus in (1, 2, 7, 8)]
    assert meshes == [(1, 1), (1, 2), (7, 1), (4, 2)]  # no more ranks than GPUs


def test_how_lessons_are_started():
    """The runs on six GPUs, in float32 and in float64, and those of DDP with more processes."""
    args = {"gpus": 6, "stages": 3, "pieces": 4, "head_parts": 4, "processes": [1, 6]}
    args |= {"widths": [64], "device": "cuda", "model": "mlp", "width": None, "batch_size": 120}
    args["only"] = ["parity", "scaling"]
    args["lessons"] = ["pipeline_parallel", "sharded_optimizer"]
    args["lessons"] += ["tensor_parallel", "hybrid_parallel"]
    runs = tool.plan(argparse.Namespace(**args))
    names = ["single_gpu.py"]
    names += ["sharded_optimizer.py, 6 processes"]
    names += ["pipeline_parallel.py, 3 processes"]
    names += ["tensor_parallel.py, 4 processes", "tensor_parallel.py --by dtensor, 4 processes"]
    names += ["hybrid_parallel.py --mesh 3x2, 6 processes"]
    counts = ("1", "6", "6 --batch_size 720")
    scaling = [f"distributed_data_parallel.py -g {count}" for count in counts]
    assert [run.name for run in runs] == 2 * names + scaling
    args |= {"model": "transformer", "only": ["parity"]}
    args["lessons"] += ["mixed_precision", "three_axes"]
    runs = tool.plan(argparse.Namespace(**args))
    names = ["single_gpu.py", "sharded_optimizer.py, 6 processes"]
    names += ["pipeline_parallel.py, 3 processes"]
    names += ["hybrid_parallel.py --mesh 3x2 --kind hsdp, 6 processes"]
    names += ["mixed_precision.py --precision full, 6 processes"]
    names += ["mixed_precision.py --precision full --sharded, 6 processes"]
    names += ["three_axes.py, 4 processes", "three_axes.py --fsdp, 4 processes"]
    assert [run.name for run in runs] == 2 * names


GROWS = """import time
before = bytearray(100 * 2**20)
time.sleep(0.5)
print("epoch 1/1  loss 1.0  train 1.00%  test 1.00%  0.50 s  100 images/s", flush=True)
after = bytearray(300 * 2**20)
time.sleep(0.5)
"""


@pytest.mark.parametrize(("linux", "most"), [(True, 550), (False, 1400)])
def test_memory(linux, most, tmp_path, monkeypatch):
    """The peak of a lesson until its end, with /proc and without it."""
    if not linux:
        monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    larger = [sys.executable, "-c", "x = bytearray(1500 * 2**20)"]
    subprocess.run(larger, check=True)  # an earlier run does not count
    words = [sys.executable, "-c", GROWS]
    status, said, memory = processes.follow(words, {}, tmp_path, 60)
    assert status == 0 and len(said) == 1
    assert 400 < memory < most


TORCH = """
class cuda:
    def is_initialized():
        return {used}

class accelerator:
    def device_count():
        return 2

    def max_memory_allocated(index):
        return (3 + index) * 2**20
"""


@pytest.mark.parametrize(("used", "expected"), [(True, 4.0), (False, None)])
def test_memory_on_gpus(used, expected, tmp_path):
    """Each process that has used a GPU leaves its peak. The cluster's own module is run, too."""
    (tmp_path / "torch.py").write_text(TORCH.format(used=used))
    (tmp_path / "sitecustomize.py").write_text("print('the cluster was here')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        variables = processes.gpu_variables(tmp_path)
    code = "import subprocess, sys, torch\n"
    code += "sys.argv[1:] or subprocess.run([sys.executable, '-c', 'import torch'])"
    words = [sys.executable, "-c", code]
    env = os.environ | variables
    done = subprocess.run(words, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.count("the cluster was here") == 2 and not done.stderr
    assert len(list(tmp_path.glob("gpu_memory_*.txt"))) == (2 if used else 0)
    assert processes.gpu_memory(tmp_path) == expected


def test_on_a_machine_that_is_not_linux(monkeypatch):
    """Cores and the name of the CPU are found without what only Linux has."""
    assert processes.cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processes.cores() == os.cpu_count()
    monkeypatch.setattr(tool.Path, "exists", lambda path: False)
    assert tool.cpu_name() == os.uname().machine


def test_scaling_on_one_core(tmp_path, monkeypatch, capsys):
    """More processes than cores are marked, and a line says that they cannot be faster."""
    monkeypatch.setattr(tool, "CORES", 1)
    monkeypatch.setattr(report, "cores", lambda: 1)
    args = argparse.Namespace(**dict.fromkeys(tool.PASSED_ON), processes=[1, 2])
    vars(args).update(device="cpu", batch_size=120)
    runs = tool.plan_scaling(args)
    words = [" ".join(tool.command(each, args, tmp_path)[0]) for each in runs]
    assert "--batch_size=120" in words[0] and words[2].endswith("-g 2 --batch_size 240")
    for each, speed in zip(runs, (100, 120, 150), strict=True):
        assert tool.command(each, args, tmp_path)[1] == {"OMP_NUM_THREADS": "1"}
        each.images_per_s, each.failed = speed, False
    tool.add_speed_ups(runs)
    assert [each.speed_up for each in runs] == [1, 1.2, 1.5]
    assert [each.efficiency for each in runs] == [1, 0.6, 0.75]
    assert [each.note for each in runs[1:]] == ["more processes than cores"] * 2
    report.tell_scaling(runs, args)
    out = " ".join(capsys.readouterr().out.split())
    assert "more processes cannot be faster than one" in out
    assert "With the same per-rank batch, 2 processes are 1.50 times as fast" in out
    draw_scaling(runs, tmp_path / "scaling.png")
    assert drawn(tmp_path / "scaling.png")


def run(lesson="x", **known):
    """Return a made-up run."""
    return tool.Run("parity", lesson, [], name=f"{lesson}.py", **known)


def test_where_ddp_starts_to_be_faster(tmp_path, capsys):
    """From made-up runs, one of which has failed: the rows, the sentence and the figure."""
    args = argparse.Namespace(widths=[64, 256, 1024], gpus=2)
    traced = [run(kind="traced", width=64, waiting=3, step=4)]
    traced.append(run(kind="traced", width=256, note="oh"))
    for speeds, where in (
        ((5, 6, 7), "with none of these widths"),
        ((5, 9, 11), "between the widths 64 and 256"),
        ((12, 12, 12), "already with the smallest width, 64"),
    ):
        runs = [*traced]
        for width, speed in zip(args.widths, speeds, strict=True):
            runs.append(run(kind="one", width=width, images_per_s=8))
            runs.append(run(kind="several", width=width, images_per_s=speed))
        rows = tool.by_width(runs, args)
        expected = {"width": 64, "one": 8, "several": speeds[0], "messages": 0.75, "note": ""}
        assert rows[0] == expected
        assert (rows[1]["messages"], rows[1]["note"]) == (None, "oh")
        tell_widths(rows, args)
        said = " ".join(capsys.readouterr().out.split())
        assert f"DDP starts to be faster than one process {where}." in said
    draw_widths(rows, tmp_path / "widths.png")
    assert drawn(tmp_path / "widths.png")


def test_what_the_tables_say(capsys):
    """From made-up runs: whether float64 shows more than rounding; a column if a GPU was used."""
    known = {"failed": False, "loss": 1.4064, "train": 72.43, "test": 85.19}
    known["loss_float64"] = 1.406419734911
    for apart, said in (
        (1e-12, "at most 1e-12, so only rounding differs"),
        (1e-3, "a loss differs by 0.001. This is more than rounding"),
    ):
        tell_parity([run("single_gpu", difference=0, **known), run(difference=apart, **known)])
        out = " ".join(capsys.readouterr().out.split())
        assert said in out and "1 of 1 end with the loss of single_gpu.py." in out
    known = {"failed": False, "images_per_s": 1, "start_up_s": 1, "memory_mib": 1}
    tell_speed([run(**known)], None)
    assert "GPU" not in capsys.readouterr().out
    tell_speed([run(**known), run(gpu_memory_mib=1234.5, **known)], None)
    assert "| on a GPU MiB |" in capsys.readouterr().out


def test_what_fails_is_a_row(change, tmp_path):
    """Three broken lessons and a missing package: status 1 names the first three only."""
    torchrun = "distributed_data_parallel_torchrun"
    playground = change(torchrun, ("optimizer.step()", "1 / 0")).parent
    for lesson, code in {
        "data_parallel": "import sys\nsys.exit('error: broken | on purpose')\n",
        "pipeline_parallel": "print('nothing')\n",
        "distributed_data_parallel2": "raise SystemExit('error: x is missing: pip install x')\n",
    }.items():
        (playground / lesson_path(lesson).relative_to(ROOT / "playground")).write_text(code)
    lessons = ("data_parallel", "distributed_data_parallel2", torchrun, "pipeline_parallel")
    flags = ("--epochs", 1, "--only", "parity", "--lessons", *lessons)
    path = playground / "figures" / "compare.py"
    done, results = compare(tmp_path / "out", *flags, path=path, status=1)
    runs = {run["name"]: run for run in results["runs"]}
    assert not runs["single_gpu.py"]["failed"]
    assert "| error: broken / on purpose |" in done.stdout
    assert runs["pipeline_parallel.py, 2 processes"]["note"] == "no epoch line, exit status 0"
    note = runs[f"{torchrun}.py, 2 processes"]["note"]
    assert note.endswith("ZeroDivisionError: division by zero")
    assert len(results["runs"]) == len(runs) + 1  # what has failed is not run again in float64
    missing = runs["distributed_data_parallel2.py -g 2"]["note"]
    assert missing == "error: x is missing: pip install x"
    assert "There are no two lessons" in done.stdout
    names = f"data_parallel.py; {torchrun}.py, 2 processes; pipeline_parallel.py, 2 processes"
    assert done.stderr.strip() == f"error: failed: {names}"


def test_a_lesson_that_hangs(tmp_path, monkeypatch):
    """It is ended after --timeout, with the process that it has started, and the note says so."""
    monkeypatch.setattr(tool, "PLAYGROUND", tmp_path)
    sleeper = "import os, time; print(os.getpid(), flush=True); time.sleep(999)"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', '{sleeper}'])\n"
    (tmp_path / "single_gpu.py").write_text(code)
    args = argparse.Namespace(**dict.fromkeys(tool.PASSED_ON), seconds=3)
    hung = run("single_gpu")
    tool.execute(hung, args, tmp_path / "01")
    assert hung.failed and hung.note == "took longer than 3 s: use a larger --timeout"
    pid = (tmp_path / "01" / "out.txt").read_text().strip()
    if pid:  # a busy machine may not come so far
        end = time.monotonic() + 300
        while alive(int(pid)) and time.monotonic() < end:  # the kernel may be slow
            time.sleep(0.1)
        assert not alive(int(pid))


def test_ctrl_c_keeps_what_there_is(tmp_path):
    """The first lesson is in the results, and no process is left, though torchrun has sessions."""
    lesson = "distributed_data_parallel_torchrun"
    flags = ("--epochs", 400, "--only", "parity", "--lessons", lesson)
    job = Lesson("figures/compare", *SHORT, "--out", tmp_path, *flags)
    printed = tmp_path / "runs" / "02" / "out.txt"
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if printed.exists() and "epoch 1/" in printed.read_text():
            break
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
        (("--out", "/proc/nowhere"), "--out: cannot write /proc/nowhere"),
        (("--widths", "0"), "must be 1 or more"),
        (("--batch_size", 100), "cannot be divided by each of [1, 2, 8]: use --batch_size 96"),
        (("--double",), "--double: leave it out"),
    ],
)
def test_bad_input(flags, told, main):
    """Status 2 and one line, before anything is run."""
    done = main("figures.compare", *SHORT, "--processes", 2, *flags)
    assert told in done.stderr and len(done.stderr.splitlines()) == 1
