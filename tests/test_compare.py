"""compare.py: its numbers are the lessons' own, a failure is a row, Ctrl-C keeps what there is.

Most of its lessons are forked here, as it is itself (see warm.py). `test_a_cold_start` and the
commands in measured.md start them.
"""

import argparse
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import matplotlib.image
import pytest
from conftest import DIGITS, ROOT, Lesson, alive, by_torchrun, epochs, one_process, talks
from lessons import LESSONS

from playground.figures import compare as tool
from playground.figures import processes
from playground.figures.charts import draw_widths
from playground.figures.report import tell_parity, tell_speed, tell_widths

SHORT = (*DIGITS, "--batch_size", 120)
LEFT_OUT = {  # lessons that train and have no run, and why
    "distributed_data_parallel_resnet",  # another model
    "fully_sharded_checkpoints",  # FSDP once more
    "expert_parallel",  # another model
}


def compare(out, *flags, path="figures/compare", status=0):
    """Run compare.py to its end. Returns what it printed and its results."""
    done = Lesson(path, *SHORT, "--out", out, *flags).wait()
    assert done.returncode == status, done.stdout + done.stderr
    return done, json.loads((out / "results.json").read_text())


def drawn(path):
    """Return whether a file is an image that has more than one colour."""
    pixels = matplotlib.image.imread(path)
    return min(pixels.shape[:2]) > 150 and float(pixels[..., :3].std()) > 0.01


@pytest.fixture
def course(tmp_path):
    """Return the playground/ of a copy of the lessons, to break."""
    for folder in ("playground", "common"):
        copy = tmp_path / "course" / folder
        shutil.copytree(ROOT / folder, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "course" / "playground"


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
        assert "gpu_memory_mib" not in run
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


def test_a_cold_start(tmp_path):
    """Start-up time, numbers and memory of ranks that torchrun starts from the command line."""
    flags = {"dataset": "digits", "device": "cpu", "batch_size": 120, "epochs": 2}
    args = argparse.Namespace(**dict.fromkeys(tool.PASSED_ON) | flags, seconds=300)
    ours = {"lesson": "distributed_data_parallel_torchrun", "words": [], "ranks": 2}
    tool.execute(ours, args, tmp_path / "01")
    assert not ours["failed"], ours
    last = {name: ours[name] for name in ("loss", "train", "test")}
    assert last == one_process(*SHORT, "--epochs", 2)[-1]
    assert 0.5 < ours["start_up_s"] < ours["epochs"][0]["at"]
    assert 200 < ours["memory_mib"] < 5000


@pytest.mark.parametrize("gpus", range(1, 9))
@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_sizes_that_fit(gpus, model):
    """On 1 to 8 GPUs each stage has a layer, each part of a layer as many neurons; batches fit."""
    assert tool.fitting_stages(gpus, model, None) == min(gpus, 4)
    assert tool.fitting_stages(gpus, model, gpus) == gpus  # as many hidden layers are enough
    pieces = tool.fitting_pieces(gpus, model, None)
    assert pieces == {3: 2, 5: 4, 6: 4, 7: 4}.get(gpus, gpus)
    assert tool.fitting_pieces(gpus, model, 100) == min(pieces, 4)
    assert tool.fitting_pieces(gpus, model, 33) == 1
    assert tool.fitting_heads(gpus, None, None) == {1: 1, 2: 2, 3: 2}.get(gpus, 4)
    assert tool.fitting_heads(gpus, 3, 784) == 1
    batch_size = tool.fitting_batch([gpus, 8], 128)
    assert batch_size % gpus == batch_size % 8 == 0 and 104 <= batch_size <= 152


def test_how_lessons_are_started():
    """Each training lesson, and by torchrun what takes its rank from the environment."""
    lines = tool.LESSONS + tool.OF_TRANSFORMERS
    names = {line.split()[0] for line in lines} | {"profile_steps"}
    training = {name for name in LESSONS if not talks(name)}
    assert names == training - LEFT_OUT
    assert set(tool.TORCHRUN) == {name for name in names if by_torchrun(name)}
    args = {
        "gpus": 6,
        "stages": 3,
        "pieces": 4,
        "head_parts": 4,
        "processes": [1, 6],
        "widths": [64],
    }
    args |= {"device": "cuda", "model": "mlp", "width": None, "batch_size": 120}
    args["only"] = ["parity", "scaling"]
    args["lessons"] = [
        "pipeline_parallel",
        "sharded_optimizer",
        "tensor_parallel",
        "hybrid_parallel",
    ]
    runs = tool.plan(argparse.Namespace(**args))
    names = ["single_gpu.py"]
    names += ["sharded_optimizer.py, 6 processes"]
    names += ["pipeline_parallel.py, 3 processes"]
    names += ["tensor_parallel.py, 4 processes", "tensor_parallel.py --by dtensor, 4 processes"]
    names += ["hybrid_parallel.py --mesh 3x2, 6 processes"]
    counts = ("1", "6", "6 --batch_size 720")
    scaling = [f"distributed_data_parallel.py -g {count}" for count in counts]
    assert [run["name"] for run in runs] == 2 * names + scaling
    args |= {"model": "transformer", "only": ["parity"]}
    args["lessons"] += ["mixed_precision", "three_axes"]
    runs = tool.plan(argparse.Namespace(**args))
    names = ["single_gpu.py", "sharded_optimizer.py, 6 processes"]
    names += ["pipeline_parallel.py, 3 processes"]
    names += ["hybrid_parallel.py --mesh 3x2 --kind hsdp, 6 processes"]
    names += ["mixed_precision.py --precision full, 6 processes"]
    names += ["mixed_precision.py --precision full --sharded, 6 processes"]
    names += ["three_axes.py, 4 processes", "three_axes.py --fsdp, 4 processes"]
    assert [run["name"] for run in runs] == 2 * names


@pytest.mark.parametrize(
    ("device", "gpus", "width", "mesh"),
    [
        ("cpu", 1, None, (2, 2)),
        ("cpu", 2, 64, (2, 2)),
        ("cpu", 2, 33, (4, 1)),
        ("cpu", 5, None, (5, 1)),
        ("cuda", 1, None, (1, 1)),
        ("cuda", 2, None, (1, 2)),
        ("cuda", 8, 120, (4, 2)),
        ("cuda", 7, 120, (7, 1)),
    ],
)
def test_the_mesh(device, gpus, width, mesh):
    """Two columns if ranks and neurons are even, no more ranks than GPUs, and four on a CPU."""
    assert tool.fitting_mesh(device, gpus, width) == mesh
    args = {
        "gpus": gpus,
        "stages": 1,
        "pieces": 1,
        "head_parts": 1,
        "device": device,
        "width": width,
    }
    args |= {"only": ["parity"], "lessons": ["hybrid_parallel"], "model": "mlp"}
    run = tool.plan(argparse.Namespace(**args))[1]
    assert run["words"] == ["--mesh", f"{mesh[0]}x{mesh[1]}"]
    assert run["ranks"] == math.prod(mesh)


def test_lessons_that_shard_a_model(tmp_path):
    """Each prints the losses of one process."""
    lessons = ("fully_sharded_data_parallel", "tensor_parallel")
    done, results = compare(tmp_path, "--epochs", 1, "--only", "parity", "--lessons", *lessons)
    _, *runs = [run for run in results["runs"] if run["kind"] == "float32"]
    assert len(runs) == 3
    assert all(run["difference"] < 1e-10 for run in runs)
    assert "3 of 3 end with the loss of single_gpu.py" in done.stdout


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


def test_memory_on_gpus_has_a_column(capsys):
    """Only if a run has used one."""
    run = {"name": "x.py", "lesson": "x", "failed": False, "images_per_s": 1, "start_up_s": 1}
    run |= {"memory_mib": 1}
    tell_speed([run], None)
    assert "GPU" not in capsys.readouterr().out
    tell_speed([run, run | {"gpu_memory_mib": 1234.5}], None)
    assert "| on a GPU MiB |" in capsys.readouterr().out


def test_on_a_machine_that_is_not_linux(monkeypatch):
    """Cores and the name of the CPU are found without what only Linux has."""
    assert processes.cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert processes.cores() == os.cpu_count()
    monkeypatch.setattr(tool.Path, "exists", lambda path: False)
    assert tool.cpu_name() == os.uname().machine


def test_scaling_on_one_core(course, tmp_path):
    """More processes than cores are marked, and a line says that they cannot be faster."""
    path = course / "figures" / "compare.py"
    one_core = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    first = "import json\n"
    text = path.read_text()
    assert text.count(first) == 1
    path.write_text(text.replace(first, one_core + first))
    done, results = compare(tmp_path, "--epochs", 1, "--only", "scaling", path=path)
    one, strong, weak = results["runs"]
    assert [run["processes"] for run in (one, strong, weak)] == [1, 2, 2]
    assert "--batch_size=120" in one["command"] and "--batch_size 240" in weak["command"]
    for run in (strong, weak):
        assert run["speed_up"] == pytest.approx(run["images_per_s"] / one["images_per_s"])
        assert run["efficiency"] == pytest.approx(run["speed_up"] / 2)
        assert run["note"] == "more processes than cores"
    assert all(run["variables"] == {"OMP_NUM_THREADS": "1"} for run in results["runs"])
    assert "more processes cannot be faster than one" in done.stdout
    assert drawn(tmp_path / "scaling.png")


@pytest.mark.parametrize(
    ("several", "where"),
    [
        ((5, 6, 7), "with none of these widths"),
        ((5, 9, 11), "between the widths 64 and 256"),
        ((12, 12, 12), "already with the smallest width, 64"),
    ],
)
def test_where_ddp_starts_to_be_faster(several, where, tmp_path, capsys):
    """From made-up runs, one of which has failed: the row, the sentence and the figure."""
    args = argparse.Namespace(widths=[64, 256, 1024], gpus=2)
    runs = []
    for width, speed in zip(args.widths, several, strict=True):
        runs.append({"kind": "one", "width": width, "images_per_s": 8})
        runs.append({"kind": "several", "width": width, "images_per_s": speed})
    runs.append({"kind": "traced", "width": 64, "waiting": 3, "step": 4})
    runs.append({"kind": "traced", "width": 256, "note": "oh"})
    rows = tool.by_width(runs, args)
    expected = {"width": 64, "one": 8, "several": several[0], "messages": 0.75, "note": ""}
    assert rows[0] == expected
    assert (rows[1]["messages"], rows[1]["note"]) == (None, "oh")
    tell_widths(rows, args)
    said = " ".join(capsys.readouterr().out.split())
    assert f"DDP starts to be faster than one process {where}." in said
    draw_widths(rows, tmp_path / "widths.png")
    assert drawn(tmp_path / "widths.png")


@pytest.mark.parametrize(
    ("apart", "said"),
    [
        (0, "at most 0, so only rounding differs"),
        (1e-12, "at most 1e-12, so only rounding differs"),
        (1e-3, "a loss differs by 0.001. This is more than rounding"),
    ],
)
def test_what_float64_shows(apart, said, capsys):
    """From made-up runs, one of them wrong: the sentence."""
    one = {"name": "single_gpu.py", "lesson": "single_gpu", "failed": False, "loss": 1.4064}
    one |= {"train": 72.43, "test": 85.19, "loss_float64": 1.406419734911, "difference": 0}
    other = one | {"name": "x.py", "lesson": "x", "difference": apart}
    tell_parity([one, other])
    out = capsys.readouterr().out
    assert said in " ".join(out.split()) and "1 of 1 end with the loss of single_gpu.py." in out


def test_what_fails_is_a_row(course, tmp_path):
    """Three broken lessons and a missing package: status 1 names the first three only."""
    torchrun = "distributed_data_parallel_torchrun"
    text = (course / f"{torchrun}.py").read_text()
    for lesson, code in {
        "data_parallel": "import sys\nsys.exit('error: broken | on purpose')\n",
        torchrun: text.replace("optimizer.step()", "1 / 0"),
        "pipeline_parallel": "print('nothing')\n",
        "distributed_data_parallel2": "raise SystemExit('error: x is missing: pip install x')\n",
    }.items():
        (course / f"{lesson}.py").write_text(code)
    lessons = ("data_parallel", "distributed_data_parallel2", torchrun, "pipeline_parallel")
    flags = ("--epochs", 1, "--only", "parity", "--lessons", *lessons)
    done, results = compare(tmp_path, *flags, path=course / "figures" / "compare.py", status=1)
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
    run = {"lesson": "single_gpu", "words": []}
    tool.execute(run, args, tmp_path / "01")
    assert run["failed"] and run["note"] == "took longer than 3 s: use a larger --timeout"
    pid = (tmp_path / "01" / "out.txt").read_text().strip()
    if pid:  # a busy machine may not come so far
        end = time.monotonic() + 300
        while alive(pid) and time.monotonic() < end:  # it is killed, but the kernel may be slow
            time.sleep(0.1)
        assert not alive(pid)


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
        (("--timeout", "0"), "must be 1 or more"),
        (("--batch_size", 100), "cannot be divided by each of [1, 2, 8]: use --batch_size 96"),
        (("--lr", "nan"), "--lr: nan must be a number"),
        (("--double",), "--double: leave it out"),
    ],
)
def test_bad_input(flags, told, main):
    """Status 2 and one line, before anything is run."""
    done = main("figures.compare", *SHORT, "--processes", 2, *flags)
    assert told in done.stderr and len(done.stderr.splitlines()) == 1


def test_help(main):
    """--help has the first paragraph of the docstring, and flags of its own and of the lessons."""
    out = main("figures.compare", "--help", status=0).stdout
    assert "What parallelism gains and costs: this tool runs the lessons" in out
    assert "--widths" in out and "--layers" in out
