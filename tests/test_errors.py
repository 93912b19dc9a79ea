"""Whatever a learner does wrong ends in one line that says what to type, and in a bounded time; no process is left."""

import argparse
import os
import pickle
import re
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import DETECTRON2, DIGITS, LESSONS, LONG, ROOT, Lesson, free_port, run

from common.guard_rails import explain

DISTRIBUTED = ["manual_data_parallel", "distributed_data_parallel", "distributed_data_parallel2"]
SPAWNED = [*DISTRIBUTED, "pipeline_parallel"]
POINT_TO_POINT = ["blocking_p2p", "nonblocking_p2p"]


def one_line(done, *words):
    """Check that stderr is a single line without a traceback and that it holds all words; return it."""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert "error: " in lines[0]
    for word in words:
        assert word in lines[0], lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("lesson", "flags", "words"),
    [
        ("single_gpu", ("--model", "rnn"), ("--model", "mlp", "cnn")),
        ("single_gpu", ("--dataset", "cifar"), ("--dataset", "mnist", "digits")),
        ("single_gpu", ("--epochs", 0), ("--epochs 0", "1 or more")),
        ("single_gpu", ("--epoch", "many"), ("--epochs", "many")),
        ("single_gpu", ("--speed", 3), ("--speed",)),
        ("model_parallel", ("--pipelined", "--micro_batches", 0), ("--micro_batches 0",)),
        ("model_parallel", ("--devices", "cpu", "cuda:99"), ("--devices cpu cuda:99", "cpu")),
        ("model_parallel", ("--devices", "cpu", "gpu"), ("--devices cpu gpu", "cpu")),
        *(
            (lesson, ("-g", 3, "--batch_size", 100), ("--batch_size 100", "3", "--batch_size 99"))
            for lesson in DISTRIBUTED
        ),
        *((lesson, ("-n", 2), ("-n 2", "-ip")) for lesson in SPAWNED + POINT_TO_POINT),
        ("distributed_data_parallel", ("-n", 2, "-ip", "127.0.0.2", "-nr", 2), ("node 2", "0 to 1")),
        ("distributed_data_parallel2", ("-n", 2, "-ip", "127.0.0.2", "-r", -1), ("node -1", "0 to 1")),
        ("distributed_data_parallel", ("-g", 0), ("--gpus 0",)),
        ("distributed_data_parallel", ("--timeout", 0), ("--timeout 0",)),
        ("distributed_data_parallel", ("--backend", "smoke"), ("smoke", "nccl", "gloo")),
        ("distributed_data_parallel", ("--backend", "nccl", "--device", "cpu"), ("nccl", "--backend gloo")),
        ("distributed_data_parallel2", ("--backend", "mpi"), ("mpi",)),
        ("distributed_data_parallel", ("-g", "two"), ("--gpus", "two")),
        *((lesson, ("-g", 1), ("-g 2",)) for lesson in POINT_TO_POINT),
    ],
)
def test_wrong_flags(lesson, flags, words, main):
    """Status 2, one line."""
    one_line(main(lesson, *flags), *words)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_wrong_flag_as_a_user_sees_it(lesson):
    """The same from the command line, at once, whatever the lesson."""
    one_line(run(lesson, "--device", "tpu", status=2, timeout=30), "--device", "auto", "cpu", "cuda")


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI")
def test_backend_mpi_on_a_torch_without_it(main):
    """The line names what to use instead."""
    one_line(main("distributed_data_parallel", "--backend", "mpi"), "without mpi", "--backend gloo")


@pytest.mark.parametrize("lesson", ["single_gpu", "model_parallel", "distributed_data_parallel", "blocking_p2p"])
def test_device_cuda_without_a_gpu(lesson):
    """A GPU that is not there: how many there are and what to type."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    one_line(run(lesson, "--device", "cuda", status=2, env=hidden), "this machine has 0", "--device cpu")


@pytest.mark.parametrize("lesson", ["data_parallel", "distributed_data_parallel"])
def test_more_gpus_than_there_are(lesson, main):
    """One GPU more than this machine has, with and without a GPU."""
    have = torch.cuda.device_count()
    words = (f"this machine has {have}", f"-g {have}") if have else ("this machine has 0", "--device cpu")
    one_line(main(lesson, "--device", "cuda", "-g", have + 1), *words)


@pytest.mark.parametrize("lesson", ["single_gpu", "distributed_data_parallel"])
def test_savefile(lesson, tmp_path, main):
    """A missing folder is made; what can't be written is said before training, and nothing is left lying there."""
    run(lesson, *DIGITS, "--epochs", 1, "-s", tmp_path / "new" / "folder" / "c.pt")
    assert os.listdir(tmp_path / "new" / "folder") == ["c.pt"]
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "c.pt"):
        done = main(lesson, *DIGITS, "-s", path)
        one_line(done, "--savefile", str(path))
        assert "epoch" not in done.stdout
    assert sorted(os.listdir(tmp_path)) == ["file", "new"]


@pytest.mark.parametrize("lesson", ["single_gpu", "distributed_data_parallel"])
def test_batch_larger_than_the_data(lesson):
    """The line gives the largest batch."""
    one_line(run(lesson, "--dataset", "digits", "--batch_size", 2000, status=1), "at most 1500")


def test_port_in_use():
    """Node 0 can't serve the rendezvous."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        flags = (*DIGITS, "-n", 2, "-nr", 0, "-ip", "127.0.0.2", "--port", port)
        one_line(run("distributed_data_parallel", *flags, status=1, timeout=30), str(port), "another --port")


@pytest.mark.parametrize("lesson", ["distributed_data_parallel", "nonblocking_p2p"])
def test_a_node_that_never_comes(lesson):
    """Node 0 waits --timeout seconds and names the ranks that are missing."""
    own = () if "p2p" in lesson else DIGITS
    flags = (*own, "-n", 2, "-g", 2, "-nr", 0, "-ip", "127.0.0.2", "--port", free_port(), "--timeout", 5)
    one_line(run(lesson, *flags, status=1, timeout=30), "ranks [2, 3] are missing", "start every node")


def test_a_node_that_never_comes_with_detectron2():
    """launch knows how many came, not which."""
    flags = (*DIGITS, "-n", 2, "-g", 1, "-r", 0, "-ip", "127.0.0.2", "--port", free_port(), "--timeout", 5)
    one_line(run("distributed_data_parallel2", *flags, status=1, timeout=30), "1/2 clients joined", "start every node")


@pytest.mark.parametrize("lesson", ["distributed_data_parallel2", "manual_data_parallel", "blocking_p2p"])
def test_wrong_address(lesson):
    """Node 1 finds nobody where node 0 should be."""
    index = "-r" if lesson == "distributed_data_parallel2" else "-nr"
    own = () if "p2p" in lesson else DIGITS
    flags = (*own, "-n", 2, "-g", 1, index, 1, "-ip", "127.0.0.3", "--port", free_port(), "--timeout", 5)
    one_line(run(lesson, *flags, status=1, timeout=40), "rank 1", "check -ip, --port")


def test_wrong_address_on_node_0():
    """Node 0 itself is told an address at which nobody can find it."""
    flags = (*DIGITS, "-n", 2, "-g", 1, "-nr", 0, "-ip", "nosuch.invalid", "--port", free_port(), "--timeout", 5)
    one_line(run("distributed_data_parallel", *flags, status=1, timeout=30), "rank 0", "check -ip, --port")


def test_a_foreign_server_on_the_port():
    """Node 1 reaches a server that accepts and never answers: it must not hang."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        flags = (*DIGITS, "-n", 2, "-g", 1, "-nr", 1, "-ip", "127.0.0.2", "--port", server.getsockname()[1])
        one_line(run("distributed_data_parallel", *flags, "--timeout", 5, status=1, timeout=30), "rank 1", "--port")


@pytest.mark.parametrize(
    ("lesson", "zero", "one", "name"),
    [
        ("distributed_data_parallel", ("--lr", 1e-3), ("--lr", 2e-3), "--lr"),
        ("distributed_data_parallel", ("-g", 1), ("-g", 2), "--gpus"),
        ("manual_data_parallel", ("--bucket",), (), "--bucket"),
        ("distributed_data_parallel2", ("--batch_size", 100), ("--batch_size", 120), "--batch_size"),
    ],
)
def test_nodes_with_different_flags(lesson, zero, one, name):
    """Noticed before the first step, by name, on both nodes; also a different number of processes."""
    index = "-r" if lesson == "distributed_data_parallel2" else "-nr"
    both = (*DIGITS, "-n", 2, "-ip", "127.0.0.2", "--port", free_port(), "--timeout", 15)
    zero, one = (("-g", 1, *flags) for flags in (zero, one))
    other = Lesson(lesson, *both, *one, index, 1)
    done, other = run(lesson, *both, *zero, index, 0, status=1, timeout=40), other.wait(40)
    assert other.returncode == 1
    assert "epoch" not in done.stdout + other.stdout
    for node in (done, other):  # the rank itself may add that it aborts: with detectron2 the group is there by then
        assert len([line for line in node.stderr.splitlines() if line.startswith("error: ")]) == 1, node.stderr
        assert "Traceback" not in node.stderr
    assert f"{name} differs" in other.stderr


def test_nodes_with_different_lessons():
    """The same, though one has flags that the other doesn't know."""
    flags = (*DIGITS, "-n", 2, "-g", 1, "-ip", "127.0.0.2", "--port", free_port(), "--timeout", 15)
    other = Lesson("manual_data_parallel", *flags, "-nr", 1)
    done, other = run("distributed_data_parallel", *flags, "-nr", 0, status=1, timeout=40), other.wait(40)
    assert other.returncode == 1
    for node in (done, other):
        one_line(node, "lesson differs: ", "manual_data_parallel.py on rank 1", "start every node with the same lesson")


def test_nodes_with_different_data(tmp_path):
    """Rank 0 trains on MNIST, node 1 has no MNIST and falls back to the digits: noticed before the first step."""
    both = ("-n", 2, "-g", 1, "-ip", "127.0.0.2", "--port", free_port(), "--timeout", 20, "--device", "cpu")
    other = Lesson("distributed_data_parallel", *both, "-nr", 1, "--dataset", "digits")
    done = run("distributed_data_parallel", *both, "-nr", 0, "--data_dir", fake_mnist(tmp_path), status=1)
    assert other.wait().returncode == 1
    one_line(done, "--dataset differs", "mnist", "digits")


def fake_mnist(folder):
    """Make files that have MNIST's names and sizes."""
    from common.data import MNIST_FILES

    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, size in MNIST_FILES.items():
        with open(raw / name, "wb") as file:
            file.truncate(size)
    return folder


@pytest.mark.parametrize(("lesson", "victim"), [*((lesson, 1) for lesson in SPAWNED), (DISTRIBUTED[0], 0)])
def test_a_rank_killed_in_mid_epoch(lesson, victim):
    """SIGKILL to one rank: the others end, and the line names the rank and the signal."""
    job = Lesson(lesson, *LONG, "-g", 2)
    os.kill(job.ranks(2)[victim], signal.SIGKILL)
    done = job.wait(30)
    assert done.returncode == 1
    one_line(done, f"rank {victim}", "SIGKILL")


def test_a_rank_killed_on_another_node():
    """Both nodes end within the timeout, and both name the victim and the signal."""
    both = (*LONG, "-n", 2, "-g", 1, "-ip", "127.0.0.2", "--port", free_port(), "--timeout", 20)
    zero = Lesson("distributed_data_parallel", *both, "-nr", 0)
    one = Lesson("distributed_data_parallel", *both, "-nr", 1)
    victim = zero.ranks(2)[1]
    wait_for_line(zero, "epoch 1/")
    os.kill(victim, signal.SIGKILL)
    zero, one = zero.wait(40), one.wait(40)
    assert (zero.returncode, one.returncode) == (1, 1)
    one_line(one, "rank 1", "SIGKILL")
    one_line(zero, "rank 1", "SIGKILL")


@pytest.mark.parametrize("lesson", ["single_gpu", "model_parallel", *SPAWNED, "blocking_p2p"])
def test_ctrl_c(lesson):
    """Ctrl-C goes to every process of the terminal's group: status 130 and one line."""
    job = Lesson(lesson, *(() if "p2p" in lesson else LONG))
    if lesson in SPAWNED + POINT_TO_POINT:
        job.ranks(2)
    else:
        wait_for_line(job, "epoch 1/")
    os.killpg(job.process.pid, signal.SIGINT)
    done = job.wait(20)
    assert done.returncode == 130
    assert done.stderr.strip().splitlines()[-1:] == ["interrupted"]
    assert "Traceback" not in done.stderr


def wait_for_line(job, start):
    """Read a lesson's output up to a line with this start."""
    for line in job.process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(job.process.stderr.read())


@pytest.mark.parametrize("delay", [0.5, 2.0])
def test_ctrl_c_while_it_starts(delay):
    """At whatever moment it comes, once the ranks are started: they still import torch, or meet."""
    job = Lesson("distributed_data_parallel", *LONG, "-g", 2)
    while len(job.pids()) < 3:
        time.sleep(0.1)
    time.sleep(delay)
    os.killpg(job.process.pid, signal.SIGINT)
    done = job.wait(20)
    assert done.returncode == 130
    assert done.stderr.strip() == "interrupted"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_orphans_when_the_starter_dies(how):
    """End only the process that started the ranks: they notice."""
    job = Lesson("distributed_data_parallel", *LONG, "-g", 2)
    job.ranks(2)
    os.kill(job.process.pid, how)
    assert job.wait(20).returncode == -how


@pytest.mark.parametrize("name", ["imagez", "timeout"])
def test_a_bug_keeps_its_traceback(name, tmp_path):
    """A mistake in a learner's copy is shown with the place where it is, once, even if it sounds like a lost rank."""
    text = (ROOT / "playground" / "distributed_data_parallel.py").read_text()
    assert text.count("logits = model(images)") == 1
    copy = tmp_path / "changed.py"
    copy.write_text(text.replace("logits = model(images)", f"logits = model({name})"))
    done = run(copy, *DIGITS, "-g", 2, status=1)
    assert done.stderr.count(f"NameError: name '{name}' is not defined") == 1
    assert re.search(r"changed.py.*, line \d+, in run_epoch", done.stderr)


class Ranks:
    """What mp.spawn returns, when each call of join() raises the next of some errors."""

    def __init__(self, *errors):
        self.errors = list(errors)

    def join(self):
        if self.errors:
            raise self.errors.pop(0)
        return True


def test_the_cause_among_the_errors_of_several_ranks(capsys):
    """A lost connection and what join() has ended are passed over, also an error that was only half written."""
    lost, bug = (
        mp.ProcessRaisedException(f"\n\n-- Process {rank} terminated:\nTraceback\n{text}", rank, 1)
        for rank, text in enumerate(("RuntimeError: Connection closed by peer", "NameError: name 'timeout' is unknown"))
    )
    ended = mp.ProcessExitedException("process 2 terminated with signal SIGTERM", 2, 1, -15, "SIGTERM")
    killed = mp.ProcessExitedException("process 3 terminated with signal SIGKILL", 3, 1, -9, "SIGKILL")
    args = argparse.Namespace(nr=0, gpus=4)
    with pytest.raises(mp.ProcessRaisedException, match="NameError"):
        explain(lost, args, Ranks(ended, EOFError(), bug))
    for errors in ((ended, killed), (pickle.UnpicklingError(), killed)):
        assert explain(lost, args, Ranks(*errors)) == 1
        assert "rank 3: process 3 terminated with signal SIGKILL" in capsys.readouterr().err
    assert explain(lost, args, Ranks(ended, EOFError())) == 1
    assert "rank 0: RuntimeError: Connection closed by peer: another rank has ended" in capsys.readouterr().err


@pytest.mark.skipif(DETECTRON2 == "the real detectron2", reason="detectron2 is installed")
def test_without_detectron2():
    """One line with the command that installs it."""
    done = run("distributed_data_parallel2", status=1, env={"PYTHONPATH": ""})
    one_line(done, "pip install --no-build-isolation 'git+https://github.com/facebookresearch/detectron2.git@")
