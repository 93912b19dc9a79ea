"""Whatever a learner does wrong ends in a bounded time, says what to do, and leaves no process."""

import argparse
import contextlib
import errno
import os
import re
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import (
    DETECTRON2,
    DIGITS,
    LESSONS,
    LONG,
    ROOT,
    SHORT,
    Lesson,
    alive,
    by_torchrun,
    free_port,
    lesson_path,
    one_line,
    run,
    talks,
    torchrun,
)
from nodes import small_disk

from common import guard_rails

pytestmark = pytest.mark.quick
SPAWNING = [
    "manual_data_parallel",
    "overlapped_data_parallel",
    "distributed_data_parallel",
    "distributed_data_parallel2",
]
POINT_TO_POINT = ["blocking_p2p", "nonblocking_p2p"]
BY_TORCHRUN = [lesson for lesson in LESSONS if by_torchrun(lesson)]
BATCH_OF_7 = "2 ranks cannot divide --batch_size 7: use 8"
TWO_NODES = ("-n", 2, "-g", 1, "-ip", "127.0.0.2")
TRANSFORMER = ("--model", "transformer")


@pytest.mark.parametrize(
    ("lesson", "flags", "words"),
    [
        ("single_gpu", ("--model", "rnn"), ("--model", "mlp", "cnn", "transformer")),
        ("single_gpu", ("--tokens", 14), ("--tokens", "need --model transformer")),
        ("single_gpu", (*TRANSFORMER, "--tokens", 30), ("--tokens: 30", "784 pixels")),
        ("single_gpu", (*TRANSFORMER, "--heads", 5), ("--heads 5", "--width 32")),
        ("single_gpu", (*TRANSFORMER, "--width", 30), ("--heads 4", "--width 30")),
        ("single_gpu", ("--dataset", "cifar"), ("--dataset", "mnist", "digits")),
        ("single_gpu", ("--epochs", 0), ("--epochs: 0", "1 or more")),
        ("single_gpu", ("--epoch", "many"), ("--epochs", "many")),
        ("single_gpu", ("--speed", 3), ("--speed",)),
        ("single_gpu", ("--lr", "nan"), ("--lr: nan", "0 or more")),
        ("single_gpu", ("--lr", "inf"), ("--lr: inf", "0 or more")),
        ("overlapped_data_parallel", ("--bucket_cap_mb", 0), ("--bucket_cap_mb 0", "more than 0")),
        ("overlapped_data_parallel", ("--bucket_cap_mb", "nan"), ("nan", "more than 0")),
        ("distributed_data_parallel", ("--lr", "-1"), ("--lr -1.0", "0 or more")),
        ("single_gpu", ("--seed", "99999999999999999999"), ("--seed: 9999", "2**63")),
        (
            "distributed_data_parallel_torchrun",
            ("--seed", "-99999999999999999999"),
            ("--seed: -9999", "2**63"),
        ),
        ("model_parallel", ("--pipelined", "--micro_batches", 0), ("--micro_batches: 0",)),
        (
            "model_parallel",
            ("--pipelined", "--micro_batches", 1000),
            ("--micro_batches 1000", "128"),
        ),
        ("model_parallel", ("--devices", "cpu", "cuda:99"), ("--devices", "cuda:99", "cpu")),
        ("model_parallel", ("--devices", "cpu", "gpu"), ("--devices", "gpu", "cpu")),
        *(
            (lesson, ("-g", 3, "--batch_size", 100), ("--batch_size 100", "3", "99"))
            for lesson in SPAWNING
        ),
        *((lesson, ("-n", 2), ("-n 2", "-ip")) for lesson in SPAWNING + POINT_TO_POINT),
        ("distributed_data_parallel", (*TWO_NODES, "-nr", 2), ("-nr 2", "0 to 1")),
        ("distributed_data_parallel2", (*TWO_NODES, "-nr", -1), ("-nr -1", "0 to 1")),
        ("distributed_data_parallel", ("-g", 0), ("--gpus 0",)),
        ("distributed_data_parallel", ("--timeout", 0), ("--timeout 0",)),
        ("distributed_data_parallel", ("--backend", "smoke"), ("smoke", "nccl", "gloo")),
        (
            "distributed_data_parallel",
            ("--backend", "nccl", "--device", "cpu"),
            ("nccl", "--backend gloo"),
        ),
        ("distributed_data_parallel", ("-g", "two"), ("--gpus", "two")),
        *((lesson, ("-g", 1), ("-g 2",)) for lesson in POINT_TO_POINT),
        ("distributed_data_parallel_resnet", ("--accumulate", 0), ("--accumulate: 0",)),
        ("distributed_data_parallel_resnet", ("--gpu_ids", "one"), ("--gpu_ids", "one")),
        ("distributed_data_parallel_torchrun", ("-g", 2), ("-g",)),
    ],
)
def test_wrong_flags(lesson, flags, words, main):
    """Status 2, one line."""
    one_line(main(lesson, *flags), *words)


# Between them, these lessons import all of PyTorch that the lessons import.
IMPORT_MOST = ("distributed_data_parallel_resnet", "fully_sharded_checkpoints", "pipeline_parallel")


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_wrong_flag_as_a_user_sees_it(lesson):
    """The same from the command line, at once, whatever the lesson; importing says nothing."""
    done = run(lesson, "--device", "tpu", status=2, cold=lesson in IMPORT_MOST)
    one_line(done, "--device", "cpu")


@pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI")
def test_backend_mpi_on_a_torch_without_it(main):
    """The line names what to use instead."""
    one_line(main("distributed_data_parallel", "--backend", "mpi"), "without mpi", "--backend gloo")


@pytest.mark.parametrize(
    "lesson", ["single_gpu", "model_parallel", "distributed_data_parallel", "blocking_p2p"]
)
def test_device_cuda_without_a_gpu(lesson):
    """A GPU that is not there: how many there are and what to type."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    one_line(
        run(lesson, "--device", "cuda", status=2, env=hidden), "--device", "this machine has no"
    )


@pytest.mark.parametrize(("processes", "words"), [(16, ""), (17, "17 processes on 2 cores: ")])
def test_many_more_processes_than_cores(processes, words, monkeypatch, capsys):
    """They are started all the same, and a line says why nothing is printed for so long."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    guard_rails.check(argparse.ArgumentParser(), argparse.Namespace(device="cpu", gpus=processes))
    said = capsys.readouterr().err
    assert said.startswith(words) and bool(said) == bool(words)


@pytest.mark.parametrize("lesson", ["data_parallel", "distributed_data_parallel"])
def test_more_gpus_than_there_are(lesson, main):
    """One GPU more than this machine has, with and without a GPU."""
    have = torch.cuda.device_count()
    words = (
        (f"this machine has {have}", f"-g {have}") if have else ("this machine has no", "--device")
    )
    one_line(main(lesson, "--device", "cuda", "-g", have + 1), *words)


@pytest.mark.parametrize("lesson", SPAWNING)
def test_under_a_launcher_that_it_is_not_for(lesson, main):
    """Each process of the launcher would train by itself: refused, with the lesson that fits."""
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(
        main(lesson, env=launched),
        "RANK is set",
        "unset RANK",
        "distributed_data_parallel_torchrun.py",
    )


def test_half_of_a_launchers_environment(main):
    """The line names what is missing."""
    half = {"RANK": "0", "WORLD_SIZE": "2"}
    one_line(main("blocking_p2p", env=half), "RANK is set, so set MASTER_ADDR, MASTER_PORT")
    done = main("distributed_data_parallel_torchrun", env=half)
    one_line(done, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set: start it with torchrun")


@pytest.mark.parametrize("lesson", BY_TORCHRUN)
def test_without_a_launcher(lesson, main):
    """The line shows the command with torchrun."""
    command = f"torchrun --standalone --nproc-per-node 2 {lesson}.py"
    one_line(main(lesson), "RANK, LOCAL_RANK, WORLD_SIZE,", f"start it with {command}")


@pytest.mark.parametrize(
    "lesson", ["distributed_data_parallel_torchrun", "distributed_data_parallel_resnet"]
)
def test_a_batch_that_the_ranks_of_a_launcher_can_not_share(lesson, main):
    """As where the lesson starts them."""
    env = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    one_line(main(lesson, "--batch_size", 100, env=env), "--batch_size 100", "3", "99")


@pytest.mark.parametrize(
    ("lesson", "flags", "words"),
    [
        ("distributed_data_parallel_torchrun", ("--batch_size", 7), BATCH_OF_7),
        ("distributed_data_parallel_torchrun", ("--batchsize", 8), "arguments: --batchsize 8"),
        ("fully_sharded_data_parallel", ("--batch_size", 7), BATCH_OF_7),
    ],
)
def test_a_mistake_under_torchrun(lesson, flags, words):
    """All ranks find it. Only one prints the line, and torchrun's report follows."""
    done = torchrun(lesson, *flags).wait()
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if "error: " in line]
    assert words in line
    assert "exitcode  : 2" in done.stderr


def test_a_mistake_of_one_rank_under_torchrun(change):
    """A rank that is not the first prints its line, too, if it is the only one with the mistake."""
    wrong = """    if os.environ["LOCAL_RANK"] == "1":
        parser.error("this rank has no data")
    train(args)
"""
    ends = wrong.replace("    train", "    time.sleep(999)\n    train")
    copy = change("distributed_data_parallel_torchrun", ("    train(args)\n", ends))
    done = torchrun(copy, *SHORT).wait()
    assert done.returncode == 1
    assert done.stderr.count("error: this rank has no data\n") == 1


def test_savefile(tmp_path, main):
    """A missing folder is made; what cannot be written is said first, and nothing is left there."""
    lesson = "distributed_data_parallel"
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
    """Node 0 of two cannot serve the rendezvous; a single node picks another port."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        flags = (*DIGITS, *TWO_NODES, "-nr", 0, "--port", port)
        one_line(run("distributed_data_parallel", *flags, status=1), str(port), "another --port")
        run("blocking_p2p", "--port", port)  # a single node takes any port that is free


@pytest.mark.parametrize("lesson", ["distributed_data_parallel", "nonblocking_p2p"])
def test_a_node_that_never_comes(lesson):
    """Node 0 waits --timeout seconds and names the nodes that are missing."""
    own = () if talks(lesson) else DIGITS
    flags = (
        *own,
        "-n",
        3,
        "-g",
        2,
        "-nr",
        0,
        "-ip",
        "127.0.0.2",
        "--port",
        free_port(),
        "--timeout",
        5,
    )
    flags += ("--batch_size", 120) if own else ()
    one_line(
        run(lesson, *flags, status=1), "nodes [1, 2] are missing after 5 s", "start every node"
    )


@pytest.mark.parametrize("lesson", ["manual_data_parallel", "blocking_p2p"])
def test_wrong_address(lesson):
    """Node 1 finds nobody where node 0 should be."""
    own = () if talks(lesson) else DIGITS
    flags = (
        *own,
        "-n",
        2,
        "-g",
        1,
        "-nr",
        1,
        "-ip",
        "127.0.0.3",
        "--port",
        free_port(),
        "--timeout",
        5,
    )
    one_line(
        run(lesson, *flags, status=1), "could not reach node 0 at 127.0.0.3", "check -ip, --port"
    )


def test_wrong_address_on_node_0():
    """Node 0 itself is told an address at which nobody can find it."""
    flags = (
        *DIGITS,
        "-n",
        2,
        "-g",
        1,
        "-nr",
        0,
        "-ip",
        "nosuch.invalid",
        "--port",
        free_port(),
        "--timeout",
        5,
    )
    one_line(
        run("distributed_data_parallel", *flags, status=1), "nosuch.invalid", "check -ip, --port"
    )


@contextlib.contextmanager
def stranger(answer):
    """Listen on a port, hand each caller to a function in a thread, and yield the port."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

    with socket.create_server(("0.0.0.0", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def drip(caller):
    """Send a byte each tenth of a second for ever."""
    with contextlib.suppress(OSError):
        while True:
            caller.sendall(b"x")
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda caller: time.sleep(60), ("could not reach node 0", "no answer")),
        (drip, ("is not node 0", "--port")),
        (lambda caller: caller.close(), ("is not node 0", "--port")),
    ],
    ids=["silent", "talking", "closing"],
)
def test_a_foreign_server_on_the_port(answer, words):
    """Node 1 reaches another program: it must not hang, whatever that does."""
    with stranger(answer) as port:
        flags = (*DIGITS, *TWO_NODES, "-nr", 1, "--port", port, "--timeout", 5)
        one_line(run("distributed_data_parallel", *flags, status=1), *words)


def test_a_foreign_caller():
    """Somebody else calls node 0 while it waits for node 1, as port scanners do: passed over."""
    port = free_port()
    flags = (*SHORT, *TWO_NODES, "--port", port)
    zero = Lesson("distributed_data_parallel", *flags, "-nr", 0)
    end = time.monotonic() + 300
    while time.monotonic() < end:
        with (
            contextlib.suppress(ConnectionRefusedError),
            socket.create_connection(("127.0.0.2", port)) as caller,
        ):
            caller.sendall(b"GET / HTTP/1.1\r\n\r\n")
            break
        time.sleep(0.1)
    run("distributed_data_parallel", *flags, "-nr", 1)
    assert zero.wait().returncode == 0


@pytest.mark.parametrize(
    ("lesson", "zero", "one", "name"),
    [
        ("distributed_data_parallel", ("--lr", 1e-3), ("--lr", 2e-3), "--lr"),
        ("distributed_data_parallel", ("-g", 1), ("-g", 2), "--gpus"),
        ("manual_data_parallel", ("--bucket",), (), "--bucket"),
        ("manual_data_parallel", ("--batch_size", 100), ("--batch_size", 120), "--batch_size"),
    ],
)
def test_nodes_with_different_flags(lesson, zero, one, name):
    """It is noticed before the ranks start, by name, on both nodes."""
    both = (*DIGITS, "-n", 2, "-ip", "127.0.0.2", "--port", free_port())
    zero, one = (("-g", 1, *flags) for flags in (zero, one))
    other = Lesson(lesson, *both, *one, "-nr", 1)
    done, other = run(lesson, *both, *zero, "-nr", 0, status=1), other.wait()
    assert other.returncode == 1
    for node in (done, other):
        one_line(
            node,
            f"{name} differs: ",
            "on node 0",
            "on node 1",
            "start every node with the same lesson and flags",
        )
        assert node.stdout == ""


def test_nodes_with_different_lessons():
    """The same, though one has flags that the other doesn't know."""
    flags = (*DIGITS, *TWO_NODES, "--port", free_port())
    other = Lesson("manual_data_parallel", *flags, "-nr", 1)
    done, other = run("distributed_data_parallel", *flags, "-nr", 0, status=1), other.wait()
    assert other.returncode == 1
    for node in (done, other):
        one_line(
            node,
            "lesson differs: ",
            "manual_data_parallel.py on node 1",
            "start every node with the same lesson",
        )


def test_nodes_with_different_data(tmp_path):
    """Node 0 has MNIST, node 1 uses the digits instead: noticed before the ranks start."""
    both = (*TWO_NODES, "--port", free_port(), "--device", "cpu")
    other = Lesson("distributed_data_parallel", *both, "-nr", 1, "--dataset", "digits")
    done = run(
        "distributed_data_parallel", *both, "-nr", 0, "--data_dir", fake_mnist(tmp_path), status=1
    )
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


@pytest.mark.parametrize("lesson", BY_TORCHRUN)
def test_ranks_of_a_launcher_with_different_flags(lesson, tmp_path):
    """Each rank was started by hand, one of them with another flag: said before the first step."""
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = ("--run_dir", tmp_path) if "resumable" in lesson else ()
    own += ("--dataset", "fake" if "resnet" in lesson else "digits", "--device", "cpu")
    one = Lesson(lesson, *own, "--lr", 0.5, env=meet | {"RANK": "1", "LOCAL_RANK": "0"})
    zero = run(lesson, *own, env=meet | {"RANK": "0", "LOCAL_RANK": "0"}, status=1)
    other = one.wait()
    assert other.returncode == 1
    for node in (zero, other):
        assert node.stderr.endswith("ValueError: the nodes differ in --lr: 0.001, 0.5\n")
        assert "epoch" not in node.stdout


@pytest.mark.parametrize(
    ("lesson", "victim"), [*((lesson, 1) for lesson in SPAWNING), (SPAWNING[0], 0)]
)
def test_a_rank_killed_in_mid_epoch(lesson, victim):
    """SIGKILL to one rank: the others end, and the line names it and the signal."""
    job = Lesson(lesson, *LONG, "-g", 2)
    os.kill(job.ranks(2)[victim], signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 1
    if lesson == "distributed_data_parallel2":
        last = done.stderr.splitlines()[-1]
        assert last.endswith(f"process {victim} terminated with signal SIGKILL")
    else:
        one_line(done, f"local_rank {victim}", "SIGKILL")


def test_a_rank_killed_on_another_node():
    """Both nodes end: one names the rank and the signal, the other says where to look."""
    both = (*LONG, *TWO_NODES, "--port", free_port(), "--timeout", 20)
    zero = Lesson("distributed_data_parallel", *both, "-nr", 0)
    one = Lesson("distributed_data_parallel", *both, "-nr", 1)
    victim = zero.ranks(2)[1]
    wait_for_line(zero, "epoch 1/")
    os.kill(victim, signal.SIGKILL)
    zero, one = zero.wait(), one.wait()
    assert (zero.returncode, one.returncode) == (1, 1)
    one_line(one, "local_rank 0", "SIGKILL")
    one_line(zero, "another rank has ended", "look for its error, on all nodes")


@pytest.mark.parametrize("lesson", [*SPAWNING, "blocking_p2p"])
def test_ctrl_c(lesson):
    """Ctrl-C goes to every process of the terminal's group: status 130, and one line or none."""
    job = Lesson(lesson, *(() if talks(lesson) else LONG))
    job.ranks(2)
    for pause in range(300):
        if (
            pause % 30 == 0
        ):  # again after a while: Python ignores a KeyboardInterrupt in a destructor
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signal.SIGINT)
        end = time.monotonic() + 1
        while alive(job.process.pid) and time.monotonic() < end:
            time.sleep(0.05)
        if not alive(job.process.pid):
            break
    done = job.wait()
    told = re.sub(r"(?s)Exception ignored in.*?\nKeyboardInterrupt:? *\n", "", done.stderr)
    words = "" if lesson == "distributed_data_parallel2" else "interrupted"
    assert (done.returncode, told.strip()) == (130, words)


def wait_for_line(job, start):
    """Read a lesson's output up to a line with this start."""
    for line in job.process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(job.process.stderr.read())


def wait_for_processes(job):
    """Wait until a lesson that starts Python has started two ranks."""
    while len(job.pids()) < 3:
        assert job.process.poll() is None, job.process.stderr.read()
        time.sleep(0.05)


@pytest.mark.parametrize("delay", [0.0, 0.5, 2.0])
def test_ctrl_c_while_it_starts(delay):
    """At any moment after the ranks are started; those that still import torch may show where."""
    job = Lesson("distributed_data_parallel", *LONG, "-g", 2, cold=True)
    wait_for_processes(job)
    time.sleep(delay)
    os.killpg(job.process.pid, signal.SIGINT)
    done = job.wait()
    assert done.returncode == 130
    assert "interrupted" in done.stderr  # perhaps inside a line of a rank's traceback


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("when", ["they train", "they start"])
def test_no_orphans_when_the_starter_dies(how, when):
    """The end of the process that started the ranks ends them, also while they import torch."""
    job = Lesson("distributed_data_parallel", *LONG, "-g", 2, cold=when == "they start")
    if when == "they train":
        job.ranks(2)
    else:
        wait_for_processes(job)
    os.kill(job.process.pid, how)
    assert job.wait().returncode == -how


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_orphans_of_a_background_job(how):
    """A shell starts what ends in & with SIGINT ignored; the ranks end all the same."""
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    job = Lesson("distributed_data_parallel", *LONG, "-g", 2, prefix=ignoring)
    job.ranks(2)
    os.kill(job.process.pid, how)
    assert job.wait().returncode == -how


BUGS = {
    "NameError": "imagez",
    "ValueError": "raise_(ValueError('timeout of my own data server'))",
    "FileNotFoundError": "open('my_class_weights.json')",
    "RuntimeError": "raise_(RuntimeError('connection to my own database refused'))",
    "ConnectionRefusedError": "raise_(ConnectionRefusedError(111, 'Connection refused'))",
}


@pytest.mark.parametrize("kind", BUGS)
@pytest.mark.parametrize("lesson", ["single_gpu", "distributed_data_parallel"])
def test_the_lessons_own_errors_keep_their_traceback(lesson, kind, tmp_path):
    """A mistake in a learner's copy is shown once, with its place, whatever it sounds like."""
    text = (ROOT / "playground" / f"{lesson}.py").read_text()
    line = "            logits = model(images)\n"
    assert text.count(line) == 1
    text = text.replace(line, f"            {BUGS[kind]}\n{line}")
    copy = tmp_path / "changed.py"
    first = "def run_epoch("
    copy.write_text(text.replace(first, f"def raise_(error):\n    raise error\n\n\n{first}"))
    done = run(copy, *DIGITS, status=1)
    assert len(re.findall(rf"^{kind}: ", done.stderr, re.M)) == 1, done.stderr
    assert re.search(r"changed.py.*, line \d+, in run_epoch", done.stderr)
    assert "error: " not in done.stderr


@pytest.fixture
def told(capsys, monkeypatch):
    """Return a function that returns what is said of a main() that ends with this error."""
    monkeypatch.setattr(guard_rails, "PAUSE", 0)

    def said(error):
        @guard_rails.explained
        def main():
            raise error

        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 1
        return capsys.readouterr().err.strip()

    return said


def test_ctrl_c_while_a_checkpoint_is_written(capsys):
    """torch.save turns it into an error of its own, which also follows from a full disk."""

    @guard_rails.explained
    def main():
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("[enforce fail at inline_container.cc] unexpected pos 64 vs 0")

    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code, capsys.readouterr().err) == (130, "interrupted\n")


CLOSED = "[/src/gloo/transport/tcp/pair.cc:544] Connection closed by peer [::1]:42"
MESH = "Gloo connectFullMesh failed with [/src/gloo/transport/tcp/pair.cc:1] Connection refused"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (dist.DistNetworkError("The server socket has failed: EADDRINUSE"), "another --port"),
        (dist.DistStoreError("Timed out after 6 seconds. 1/2 clients joined."), "start every node"),
        (dist.DistNetworkError("The client socket has timed out after 60s"), "check the address"),
        (RuntimeError(MESH), "GLOO_SOCKET_IFNAME"),
        (RuntimeError(CLOSED), "look for its error, on all nodes"),
        (OSError(errno.ENOSPC, "No space left on device"), "make room"),
        (mp.ProcessExitedException("process 3 terminated", 3, 1, -9, "SIGKILL"), "local_rank 3"),
    ],
)  # fmt: skip
def test_what_ends_in_one_line(error, words, told):
    """It holds what PyTorch says, and what to do."""
    line = told(error)
    assert line.startswith("error: ") and words in line and len(line.splitlines()) == 1


def test_ranks_of_a_launcher_have_no_flags_for_the_address(told, monkeypatch):
    """The advice names the variables that a launcher sets."""
    monkeypatch.setenv("RANK", "0")
    line = told(dist.DistNetworkError("The server socket has failed: EADDRINUSE"))
    assert line.endswith("choose another MASTER_PORT, the same on every node")
    line = told(dist.DistStoreError("Timed out after 6 seconds. 1/2 clients joined."))
    assert "with the same MASTER_ADDR and MASTER_PORT; check" in line


def test_a_lost_connection_names_the_line_of_the_lesson(told):
    """And the call at which the rank waited, and why it ended."""
    line = told(RuntimeError(CLOSED))
    place, _, rest = line.partition(": Connection closed by peer [::1]:42: ")
    assert re.fullmatch(r"error: this rank waited at test_errors.py, line \d+: raise error", place)
    assert rest.startswith("another rank has ended, is in a different collective, or has lost ")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (dist.DistBackendError("NCCL error: Duplicate GPU detected"), "MULTI_RANK_GPU_ENABLE=1"),
        (dist.DistBackendError("Ranks are using the same GPU"), "MULTI_RANK_GPU_ENABLE=1"),
        (dist.DistBackendError("NCCL watchdog, all is lost"), "look for its error"),
        (torch.OutOfMemoryError("CUDA out of memory"), "use a smaller --batch_size"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "use a smaller --batch_size"),
    ],
)  # fmt: skip
def test_what_keeps_its_traceback_and_ends_in_advice(error, advice, told):
    """The traceback has the place, the last line says what to do."""
    lines = told(error).splitlines()
    assert lines[0].startswith("Traceback") and "raise error" in "".join(lines)
    assert advice in lines[-1]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("gloo and NCCL are my cats, timeout, Connection closed by peer"),
        ValueError("[/gloo/transport/tcp/pair.cc:544] is where I looked"),
        FileNotFoundError(2, "No such file or directory", "my_class_weights.json"),
        TimeoutError("EADDRINUSE"),
    ],
)
def test_what_only_sounds_like_it(error, told):
    """Types and marks count, not words: the traceback stays, and nothing is added."""
    lines = told(error).splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == f"{type(error).__name__}: {error}"


def test_the_cause_is_told_and_not_what_follows_from_it(tmp_path):
    """Rank 1 has a bug. Rank 0 loses its connection by it, and waits for rank 1 to say so."""
    text = lesson_path("distributed_data_parallel").read_text()
    line = "            logits = model(images)\n"
    assert text.count(line) == 1
    bug = "            if dist.get_rank() == 1:\n                raise KeyError('mine')\n"
    copy = tmp_path / "changed.py"
    copy.write_text(text.replace(line, bug + line))
    done = run(copy, *DIGITS, status=1, cold=True)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.startswith("-- Process 1 terminated with the following error:")
    assert done.stderr.strip().splitlines()[-1] == "KeyError: 'mine'"


def test_without_detectron2():
    """One line with the command that installs it."""
    if DETECTRON2 == "the real detectron2":
        pytest.skip("detectron2 is installed")
    done = run("distributed_data_parallel2", status=1, env={"PYTHONPATH": ""})
    one_line(
        done,
        "pip install --no-build-isolation 'git+https://github.com/facebookresearch/detectron2.git@",
    )


def test_a_full_disk(tmp_path):
    """No room for the next checkpoint: one line, and the last checkpoint is whole."""
    lesson = "distributed_data_parallel"
    path = tmp_path / "c.pt"
    with small_disk(tmp_path, "1100k"):
        run(lesson, *SHORT, "-s", path)
        (tmp_path / "filler").write_bytes(bytes(300_000))
        done = run(lesson, *SHORT, "-s", path, status=1)
        one_line(done, "No space left on device", "make room", "--savefile")
        torch.load(path, weights_only=True)
