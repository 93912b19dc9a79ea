"""The torchrun lesson: the same numbers, restarts that change nothing, checkpoints that survive, one log."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import DIGITS, LONG, ROOT, Job, Lesson, epochs, one_process, run
from test_errors import one_line, wait_for_line
from test_parity import assert_equal

LESSON = "distributed_data_parallel_torchrun"
PATH = ROOT / "playground" / f"{LESSON}.py"
SHORT = (*DIGITS, "--batch_size", 120, "--epochs", 2)
MANY = (*DIGITS, "--batch_size", 120, "--epochs", 40)


def torchrun(*flags, processes=2, restarts=0, script=PATH, env=None):
    """Start the lesson under torchrun on one node."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    return Job(*agent, "--max-restarts", restarts, script, *flags, env=env)


def result(folder, out, epoch=2):
    """Return the epoch lines of a run and its checkpoint."""
    return epochs(out), torch.load(folder / f"epoch-{epoch:04}.pt", weights_only=True)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The reference: single_gpu.py's epoch lines and checkpoint for each model."""
    found = {}
    for model in ("mlp", "cnn"):
        path = tmp_path_factory.mktemp("single") / f"{model}.pt"
        out = run("single_gpu", *SHORT, "--model", model, "-s", path).stdout
        found[model] = epochs(out), torch.load(path, weights_only=True)
    return found


@pytest.mark.parametrize(("model", "accumulate"), [("mlp", 1), ("cnn", 4)])
def test_plain_python_is_a_single_process(model, accumulate, single, tmp_path):
    """Without torchrun: one rank, the same numbers, also when a batch is computed in pieces."""
    flags = ("--run_dir", tmp_path / "run", "--model", model, "--accumulate", accumulate)
    assert_equal(result(tmp_path / "run", run(LESSON, *SHORT, *flags).stdout), single[model])


@pytest.mark.parametrize(
    ("processes", "model", "accumulate"), [(2, "mlp", 1), (3, "mlp", 3), (2, "cnn", 4), (4, "cnn", 1)]
)
def test_parity(processes, model, accumulate, single, tmp_path):
    """Under torchrun the same losses, accuracies and weights, with gradient accumulation as well.

    3 processes have 40 images each: in 3 pieces these are 14, 14 and 12, whose means must not count the same.
    """
    flags = ("--run_dir", tmp_path / "run", "--model", model, "--accumulate", accumulate)
    done = torchrun(*SHORT, *flags, processes=processes).wait()
    assert done.returncode == 0, done.stderr
    assert_equal(result(tmp_path / "run", done.stdout), single[model])


def test_no_sync_saves_messages():
    """With 4 pieces, the gradients of 3 stay on the rank: one all-reduce a step instead of four."""
    counted = """
import os, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import distributed_data_parallel_torchrun as lesson
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)))
calls = []
def hook(state, bucket):
    calls.append(1)
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
model.register_comm_hook(None, hook)
batch = torch.randn(8, 1, 28, 28), torch.arange(8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
lesson.run_epoch(model, [batch] * 3, torch.device("cpu"), optimizer, accumulate=4)
print("all-reduces:", len(calls))
os._exit(0)
"""
    path = os.pathsep.join([str(ROOT / "playground"), str(ROOT)])
    command = [sys.executable, "-u", "-c", counted]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=60)
    assert "all-reduces: 3" in done.stdout, done.stderr


def test_a_killed_rank_changes_nothing(tmp_path):
    """SIGKILL to a rank, twice: torchrun restarts all, they go on from the checkpoint and end with the same weights."""
    whole = run(LESSON, *MANY, "--run_dir", tmp_path / "whole").stdout
    job = torchrun(*MANY, "--run_dir", tmp_path / "killed", restarts=3)
    for victim in (1, 0):
        pids = job.ranks(2)
        wait_for_line(job, "epoch ")
        os.kill(pids[victim], signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "killed" / "log.txt").read_text()
    assert 1 <= len(re.findall("of 40 epochs are done", log)) <= 2
    assert epochs(log)[-1] == epochs(whole)[-1]
    one, other = (
        torch.load(tmp_path / folder / "epoch-0040.pt", weights_only=True)["model"] for folder in ("whole", "killed")
    )
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=0)


def test_without_restarts_a_killed_rank_ends_the_run(tmp_path):
    """torchrun ends the other rank and reports the signal; nothing is left."""
    job = torchrun(*LONG, "--run_dir", tmp_path / "run")
    os.kill(job.ranks(2)[1], signal.SIGKILL)
    done = job.wait(60)
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr


def test_what_is_in_the_run_folder(tmp_path):
    """Rank 0 alone writes: one log, one set of curves, the last three checkpoints; a second start goes on."""
    for count in (2, 5):
        done = torchrun(*DIGITS, "--epochs", count, "--run_dir", tmp_path / "run").wait()
        assert done.returncode == 0, done.stderr
    names = sorted(os.listdir(tmp_path / "run"))
    assert [name for name in names if name.startswith("epoch")] == [f"epoch-000{number}.pt" for number in (3, 4, 5)]
    assert len([name for name in names if name.startswith("events")]) == 2  # one for each start, none of rank 1
    assert len(names) == 3 + 2 + 1
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.findall(r"^epoch (\d)", log, re.M) == list("12345")
    assert "2 of 5 epochs are done" in log

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    curves = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert set(curves) == {"loss", "accuracy/train", "accuracy/test", "images per second"}
    for values in curves.values():
        assert [step for step, _ in values] == [1, 2, 3, 4, 5]
    for (_, value), line in zip(curves["loss"], epochs(log), strict=True):
        assert value == pytest.approx(line["loss"], abs=1e-4)

    again = run(LESSON, *DIGITS, "--epochs", 5, "--run_dir", tmp_path / "run")
    assert "5 of 5 epochs are done" in again.stdout
    assert "epoch 5" not in again.stdout
    other = run(LESSON, *DIGITS, "--epochs", 6, "--lr", 1, "--run_dir", tmp_path / "run", status=1)
    one_line(other, "--lr 0.001", "--run_dir")


def test_a_checkpoint_cut_short(tmp_path):
    """The one before it is used, the log says so, and the end is the same."""
    folder = tmp_path / "run"
    run(LESSON, *DIGITS, "--epochs", 3, "--run_dir", folder)
    expected = torch.load(folder / "epoch-0003.pt", weights_only=True)["model"]
    for path, part in ((folder / "epoch-0003.pt", 0.6), (folder / "epoch-0002.pt", 0)):
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    done = torchrun(*DIGITS, "--epochs", 3, "--run_dir", folder).wait()
    assert done.returncode == 0, done.stderr
    for number in (3, 2):
        assert re.search(f"WARNING: .*epoch-000{number}.pt is damaged .*: using the one before it", done.stdout)
    assert "1 of 3 epochs are done" in done.stdout
    for name, weight in torch.load(folder / "epoch-0003.pt", weights_only=True)["model"].items():
        torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=0)


def test_all_checkpoints_damaged(tmp_path):
    """It stops, rather than train anew and remove what might still be saved."""
    folder = tmp_path / "run"
    run(LESSON, *DIGITS, "--epochs", 2, "--run_dir", folder)
    for path in folder.glob("epoch-*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    done = run(LESSON, *DIGITS, "--epochs", 2, "--run_dir", folder, status=1)
    one_line(done, "epoch-0001.pt is damaged, and there is none before it", "--run_dir")
    assert len(list(folder.glob("epoch-*.pt"))) == 2


def test_processes_of_a_launcher_and_own_flags():
    """-g under torchrun: the launcher says how many there are."""
    done = torchrun(*SHORT, "-g", 2).wait(60)
    assert done.returncode == 1
    assert "a launcher says how many processes there are: leave -n, -g and -nr out" in done.stderr


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint: one line, the ones before it are whole, and with more room it goes on."""
    from nodes import need, sh

    need("mount")
    folder = tmp_path / "small"
    folder.mkdir()
    sh("mount", "-t", "tmpfs", "-o", "size=1900k", "tmpfs", folder)
    try:
        done = run(LESSON, *DIGITS, "--epochs", 5, "--run_dir", folder / "run", status=1)
        one_line(done, "No space left on device", "make room", "--run_dir")
        saved = sorted((folder / "run").glob("epoch-*.pt"))
        assert saved
        for path in saved:
            torch.load(path, weights_only=True)
        sh("mount", "-o", "remount,size=20m", folder)
        done = run(LESSON, *DIGITS, "--epochs", 5, "--run_dir", folder / "run")
        assert f"{len(saved)} of 5 epochs are done" in done.stdout
        assert epochs(done.stdout)[-1] == one_process(*DIGITS, "--epochs", 5)[-1]
    finally:
        sh("umount", folder)


def test_resnet18_on_colour_images(tmp_path):
    """Fine-tuning from weights on disk, two ranks, gradient accumulation, files in CIFAR-10's layout.

    The learning rate is tiny, so that the weights of the checkpoint are still those of the file.
    """
    from common.models import resnet18

    given = resnet18()
    given.fc = torch.nn.Linear(512, 1000)
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(given.state_dict(), tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth")
    flags = ("--model", "resnet18", "--dataset", "cifar10", "--device", "cpu", "--batch_size", 32, "--epochs", 1)
    flags = (*flags, "--pretrained", "--lr", 1e-9, "--accumulate", 2, "--data_dir", tmp_path)
    script = Path(__file__).parent / "cifar10_standin.py"
    done = torchrun(*flags, "--run_dir", tmp_path / "run", script=script, env={"TORCH_HOME": str(tmp_path)}).wait()
    assert done.returncode == 0, done.stderr
    assert len(epochs(done.stdout)) == 1
    state = torch.load(tmp_path / "run" / "epoch-0001.pt", weights_only=True)["model"]
    assert state["fc.weight"].shape == (10, 512)
    torch.testing.assert_close(state["conv1.weight"], given.conv1.weight, atol=1e-6, rtol=0)
    assert state["bn1.num_batches_tracked"] == 2 * 2  # two steps in two pieces
    assert state["bn1.running_mean"].abs().sum() > 0


def test_resnet18_resumes_with_its_batch_norm(tmp_path):
    """Grey images do, too; a restarted run ends with the weights and averages of one that was not."""
    flags = (*DIGITS, "--model", "resnet18", "--batch_size", 500)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(LESSON, *flags, "--epochs", 2, "--run_dir", whole)
    for count in (1, 2):
        run(LESSON, *flags, "--epochs", count, "--run_dir", parts)
    one, other = (torch.load(folder / "epoch-0002.pt", weights_only=True)["model"] for folder in (whole, parts))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpu_ids", "1,6,3", "--device", "cpu"), ("--gpu_ids", "GPUs")),
        (("--gpu_ids", "one"), ("--gpu_ids", "one")),
        (("--accumulate", 0), ("--accumulate 0",)),
        (("--dataset", "cifar10"), ("--model resnet18",)),
        (("-g", 2), ("torchrun --standalone --nproc-per-node 2",)),
        (("-n", 2, "-ip", "10.0.0.1"), ("run/torchrun_node.sh",)),
        (("--pretrained",), ("--model resnet18",)),
        (("--batch_size", 0), ("--batch_size 0",)),
        (("--init_method", "tcp://10.0.0.1:8888"), ("leave --init_method out",)),
    ],
)
def test_wrong_flags(flags, words, main):
    """Status 2, one line."""
    one_line(main(LESSON, *flags), *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "resnet18", "--dataset", "cifar10"), ("CIFAR-10", "copy its files to")),
        ((*DIGITS, "--model", "resnet18", "--pretrained"), ("leave --pretrained out",)),
        ((*DIGITS, "--run_dir", "/proc/here"), ("--run_dir",)),
    ],
)
def test_what_can_not_be_had(flags, words, tmp_path):
    """Status 1, one line: no data, no weights, no folder."""
    env = {"TORCH_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    own = ("--data_dir", tmp_path, "--run_dir", tmp_path / "run") if "--run_dir" not in flags else ()
    one_line(run(LESSON, *own, *flags, status=1, timeout=60, env=env), *words)


def test_ctrl_c_under_torchrun(tmp_path):
    """Ctrl-C reaches torchrun and the ranks; none is left, and the checkpoints are good."""
    job = torchrun(*LONG, "--run_dir", tmp_path / "run")
    job.ranks(2)
    wait_for_line(job, "epoch 2/")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait(60).returncode != 0
    assert "Ctrl-C" not in (tmp_path / "run" / "log.txt").read_text()
    for path in (tmp_path / "run").glob("epoch-*.pt"):
        torch.load(path, weights_only=True)


def test_ctrl_c_alone(tmp_path):
    """As in single_gpu.py."""
    job = Lesson(LESSON, *LONG, "--run_dir", tmp_path / "run")
    wait_for_line(job, "epoch 1/")
    os.killpg(job.process.pid, signal.SIGINT)
    done = job.wait(20)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_the_report_names_the_cause(tmp_path):
    """A mistake on one rank: torchrun's own report has its traceback, because train is recorded."""
    text = PATH.read_text()
    assert text.count("torch.manual_seed(args.seed)") == 1
    copy = tmp_path / "changed.py"
    copy.write_text(text.replace("torch.manual_seed(args.seed)", "assert rank == 0, 'a mistake on one rank'"))
    done = torchrun(*SHORT, "--run_dir", tmp_path / "run", script=copy, env={"PYTHONPATH": str(ROOT)}).wait(60)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("Root Cause") :]
    assert "rank      : 1" in report
    assert "a mistake on one rank" in report
