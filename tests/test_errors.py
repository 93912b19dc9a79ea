"""Whatever a learner does wrong ends in a bounded time, says what to do, and leaves no process."""

import contextlib
import os
import re
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from conftest import (
    DETECTRON2,
    DIGITS,
    LONG,
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
from lessons import LESSONS
from nodes import small_disk

pytestmark = pytest.mark.quick
SPAWNING = [
    "manual_data_parallel",
    "overlapped_data_parallel",
    "distributed_data_parallel",
    "distributed_data_parallel2",
]
TALKING = [lesson for lesson in LESSONS if talks(lesson)]
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
        ("overlapped_data_parallel", ("--bucket_cap_mb", "nan"), ("nan", "0 or more")),
        ("distributed_data_parallel", ("--lr", "-1"), ("--lr: -1", "0 or more")),
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
        *((lesson, ("-n", 2), ("-n 2", "-ip")) for lesson in SPAWNING + TALKING),
        ("distributed_data_parallel", (*TWO_NODES, "-nr", 2), ("-nr 2", "0 to 1")),
        ("distributed_data_parallel2", (*TWO_NODES, "-nr", -1), ("-nr -1", "0 to 1")),
        *((lesson, ("-g", 0), ("--gpus: 0",)) for lesson in SPAWNING + TALKING),
        ("distributed_data_parallel", ("--timeout", 0), ("--timeout: 0",)),
        ("distributed_data_parallel", ("--port", 65536), ("--port: 65536", "65535")),
        ("blocking_p2p", ("--port", 0), ("--port: 0", "65535")),
        ("distributed_data_parallel", ("--backend", "smoke"), ("no backend smoke",)),
        ("collectives", ("--backend", "nccl", "--device", "cpu"), ("nccl", "leave --backend out")),
        ("distributed_data_parallel", ("-g", "two"), ("--gpus", "two")),
        *((lesson, ("-g", 1), ("-g 2",)) for lesson in TALKING),
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
    one_line(main("distributed_data_parallel", "--backend", "mpi"), "no backend mpi")


@pytest.mark.parametrize(
    "lesson", ["single_gpu", "model_parallel", "distributed_data_parallel", "blocking_p2p"]
)
def test_device_cuda_without_a_gpu(lesson):
    """A GPU that is not there: how many there are and what to type."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    one_line(
        run(lesson, "--device", "cuda", status=2, env=hidden), "--device", "this machine has no"
    )


@pytest.mark.parametrize("lesson", ["data_parallel", "distributed_data_parallel"])
def test_more_gpus_than_there_are(lesson, main):
    """One GPU more than this machine has, with and without a GPU."""
    have = torch.cuda.device_count()
    words = ("this machine has no", "--device")
    if have:
        words = (f"this machine has {have}", f"-g {have}")
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
    for lesson in ("blocking_p2p", "distributed_data_parallel_torchrun"):
        done = main(lesson, env={"RANK": "0", "WORLD_SIZE": "2"})
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


def test_files_and_folders_that_can_not_be_written(tmp_path, main):
    """It is said before anything starts, and nothing is left there."""
    (tmp_path / "file").write_text("")
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    launched |= {"LOCAL_RANK": "0"}
    for lesson, flag in [
        ("distributed_data_parallel", "--savefile"),
        ("distributed_data_parallel_resumable", "--run_dir"),
        ("fully_sharded_checkpoints", "--run_dir"),
        ("profile_steps", "--out"),
    ]:
        path = tmp_path / "file" / "new"
        done = main(lesson, *DIGITS, flag, path, env=launched if by_torchrun(lesson) else None)
        one_line(done, flag, f"cannot write {path}")
    for path in (tmp_path, tmp_path / "missing" / "c.pt"):
        done = main("distributed_data_parallel", *DIGITS, "--savefile", path)
        one_line(done, "--savefile", f"cannot write {path}")
    assert os.listdir(tmp_path) == ["file"]


def told(done, *words):
    """A node of a lesson that starts its ranks: the traceback of one rank, and a last line."""
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("-- Process ") == 1, done.stderr  # PyTorch's warnings may come first
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    for word in words:
        assert word in last, done.stderr


COME = "All {} ranks must connect to tcp://{}:{}: start every node, with the same -n, -g"


@pytest.mark.parametrize("lesson", ["single_gpu", "distributed_data_parallel"])
def test_batch_larger_than_the_data(lesson):
    """The line gives the largest batch."""
    one_line(run(lesson, "--dataset", "digits", "--batch_size", 2000, status=1), "at most 1500")


def test_port_in_use():
    """Node 0 of two cannot serve the rendezvous; a single node picks another port."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        flags = (*DIGITS, *TWO_NODES, "-nr", 0, "--port", port)
        done = run("distributed_data_parallel", *flags, status=1)
        told(done, COME.format(2, "127.0.0.2", port), "free --port")
        assert "EADDRINUSE" in done.stderr
        run("blocking_p2p", "--port", port)  # a single node takes any port that is free


@pytest.mark.parametrize("lesson", ["distributed_data_parallel", "nonblocking_p2p"])
def test_a_node_that_never_comes(lesson):
    """Node 0 waits --timeout seconds, and then says what to start."""
    port = free_port()
    flags = ("-n", 2, "-g", 1, "-nr", 0, "-ip", "127.0.0.2", "--port", port, "--timeout", 5)
    flags += () if talks(lesson) else DIGITS
    told(run(lesson, *flags, status=1), COME.format(2, "127.0.0.2", port))


@pytest.mark.parametrize(
    ("lesson", "node", "address"),
    [
        ("manual_data_parallel", 1, "127.0.0.3"),
        ("blocking_p2p", 1, "127.0.0.3"),
        ("distributed_data_parallel", 0, "nosuch.invalid"),
    ],
)
def test_wrong_address(lesson, node, address):
    """Node 1 finds no other node there, or even node 0 cannot be found there."""
    port = free_port()
    flags = ("-n", 2, "-g", 1, "-nr", node, "-ip", address, "--port", port, "--timeout", 5)
    flags += () if talks(lesson) else DIGITS
    done = run(lesson, *flags, status=1)
    told(done, COME.format(2, address, port))
    assert f"trying to connect to ({address}, {port})" in done.stderr


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


def both_nodes(lesson, zero, one, other_lesson=None, env=None):
    """Run two nodes with a rank each, and with flags of their own. Returns how both ended."""
    both = (*TWO_NODES, "--port", free_port(), "--timeout", 20)
    other = Lesson(other_lesson or lesson, *both, *one, "-nr", 1, env=env)
    done = run(lesson, *both, *zero, "-nr", 0, status=1)
    return done, other.wait()


@pytest.mark.parametrize(
    ("lesson", "flag", "zero", "one"),
    [
        ("distributed_data_parallel", "--lr", 0.001, 0.002),
        ("manual_data_parallel", "--batch_size", 100, 120),
        ("overlapped_data_parallel", "--by", "buckets", "each"),
    ],
)
def test_nodes_with_different_flags(lesson, flag, zero, one):
    """It is noticed before the first step, by name, on both nodes."""
    for done in both_nodes(lesson, (*DIGITS, flag, zero), (*DIGITS, flag, one)):
        told(done, "ValueError: the nodes differ in " + flag, str(zero), str(one))
        assert done.stdout == ""


def test_nodes_with_different_numbers_of_ranks():
    """They wait for ranks that will not come, and then say that -g must be the same."""
    port = free_port()
    both = (*DIGITS, "-n", 2, "-ip", "127.0.0.2", "--port", port, "--timeout", 10)
    lesson = "distributed_data_parallel"
    other = Lesson(lesson, *both, "-g", 2, "-nr", 1)
    told(run(lesson, *both, "-g", 1, "-nr", 0, status=1), COME.format(2, "127.0.0.2", port))
    told(other.wait(), COME.format(4, "127.0.0.2", port))


def test_nodes_with_different_lessons():
    """Node 1 has a flag that the other lesson does not know, and says so. Node 0 loses it."""
    done = both_nodes("distributed_data_parallel", DIGITS, DIGITS, "manual_data_parallel")
    told(done[1], "ValueError: the nodes differ in --bucket: False, None")
    assert done[0].returncode == 1 and done[0].stdout.count("epoch") == 0


@pytest.mark.parametrize("lesson", ["distributed_data_parallel", *BY_TORCHRUN[:1]])
def test_nodes_with_different_data(lesson, mnist, tmp_path):
    """Node 0 has MNIST. Node 1 has none and cannot fetch it, so it would train on the digits."""
    no_network = {"https_proxy": "http://127.0.0.1:1", "http_proxy": "http://127.0.0.1:1"}
    zero = ("--device", "cpu", "--data_dir", mnist)
    one = ("--device", "cpu", "--data_dir", tmp_path / "one")
    if by_torchrun(lesson):
        meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        meet |= {"LOCAL_RANK": "0"}
        other = Lesson(lesson, *one, env=meet | no_network | {"RANK": "1"})
        done = (run(lesson, *zero, env=meet | {"RANK": "0"}, status=1), other.wait())
    else:
        done = both_nodes(lesson, zero, one, env=no_network)
    for node in done:
        assert node.returncode == 1
        last = node.stderr.strip().splitlines()[-1]
        assert last == "ValueError: the nodes differ in --dataset: digits, mnist"
        assert "epoch" not in node.stdout


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
    """SIGKILL to one rank: the others end, and the last line names it and the signal."""
    job = Lesson(lesson, *LONG, "-g", 2)
    os.kill(job.ranks(2)[victim], signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"process {victim} terminated with signal SIGKILL")


def test_a_rank_killed_on_another_node():
    """Both nodes end: one names the rank and the signal, the other has lost its connection."""
    both = (*LONG, *TWO_NODES, "--port", free_port(), "--timeout", 20)
    zero = Lesson("distributed_data_parallel", *both, "-nr", 0)
    one = Lesson("distributed_data_parallel", *both, "-nr", 1)
    victim = zero.ranks(2)[1]
    wait_for_line(zero, "epoch 1/")
    os.kill(victim, signal.SIGKILL)
    zero, one = zero.wait(), one.wait()
    assert one.returncode == 1
    assert one.stderr.strip().endswith("process 0 terminated with signal SIGKILL")
    told(zero, "RuntimeError: ", "by peer")


@pytest.mark.parametrize("lesson", [*SPAWNING, "blocking_p2p"])
def test_ctrl_c(lesson):
    """Ctrl-C goes to every process of the terminal's group: status 130, and no word."""
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
    said = re.sub(r"(?s)Exception ignored in.*?\nKeyboardInterrupt:? *\n", "", done.stderr)
    assert (done.returncode, said.strip()) == (130, "")


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


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_no_orphans_when_the_starter_dies(how):
    """The end of the process that started the ranks ends them."""
    job = Lesson("distributed_data_parallel", *LONG, "-g", 2)
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
    text = lesson_path(lesson).read_text()
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


def test_the_cause_is_told_and_not_what_follows_from_it(tmp_path):
    """Rank 1 has a bug. Rank 0 loses its connection by it, and waits for rank 1 to say so."""
    text = lesson_path("distributed_data_parallel").read_text()
    line = "            logits = model(images)\n"
    assert text.count(line) == 1
    bug = "            if dist.get_rank() == 1:\n                raise KeyError('mine')\n"
    copy = tmp_path / "changed.py"
    copy.write_text(text.replace(line, bug + line))
    done = run(copy, *DIGITS, status=1, cold=True)
    told(done, "KeyError: 'mine'")
    assert "-- Process 1 terminated with the following error:" in done.stderr


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
    """No room for the next checkpoint: the error says so, and the last checkpoint is whole."""
    lesson = "distributed_data_parallel"
    path = tmp_path / "c.pt"
    with small_disk(tmp_path, "1100k"):
        run(lesson, *SHORT, "-s", path)
        (tmp_path / "filler").write_bytes(bytes(300_000))
        done = run(lesson, *SHORT, "-s", path, status=1)
        assert "OSError: [Errno 28] No space left on device" in done.stderr
        assert sorted(os.listdir(tmp_path)) == ["c.pt", "filler"]
        torch.load(path, weights_only=True)
