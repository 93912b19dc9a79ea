"""survivors.py: ranks are killed, paused and added, and the digits stay those of one process."""

import os
import re
import signal

import pytest
from launch import DIGITS, Lesson, epochs, free_port, one_process, run
from nodes import ADDRESSES, read_until

FLAGS = (*DIGITS, "--batch_size", 120, "--epochs", 4, "--double")
GRACE = ("--grace", 2)  # on a busy machine, survivors may notice a death half a second apart
PATIENT = (*GRACE, "--timeout", 60)
STEP = 20  # in which the ranks wait for the test
KILL = '        if [me, progress["step"]] == args.kill:\n'
WAIT = """\
        while progress["step"] == {step} and {until}:
            time.sleep(0.01)
            if store.add("group", 0) != group:
                group = regroup(store, me, model, optimizer, progress, args)
"""
FORM = "            try:\n                dist.init_process_group(\n"


@pytest.fixture
def waiting(change, tmp_path):
    """Return a function that copies the lesson: its ranks wait in a step until a file is there.

    Those that are asked to form another group do that first.
    """
    gate = tmp_path / "gate"

    def copied(*pairs):
        wait = WAIT.format(step=STEP, until=f"not os.path.exists({str(gate)!r})")
        return change("survivors", (KILL, wait + KILL), *pairs), gate

    return copied


def processes(text):
    """Return the ids of the processes that a run has started, in the order of their numbers."""
    return [int(pid) for pid in re.search(r"^processes (.*)", text, re.M)[1].split()]


def assert_right(out):
    """Check that each epoch has one line, with the numbers of a single process."""
    assert epochs(out) == one_process(*FLAGS, apart=1e-10)


@pytest.mark.quick
@pytest.mark.parametrize(("ranks", "kill"), [(1, ()), (3, ()), (2, (0, 25)), (3, (1, 13))])
def test_the_numbers_of_one_process(ranks, kill):
    """With 1 to 3 ranks, and if one dies in a step of training, or in the test (25)."""
    flags = ("--kill", *kill) if kill else ()
    done = run("survivors", *FLAGS, *PATIENT, *flags, "--port", free_port(), processes=ranks)
    assert_right(done.stdout)
    formed = re.findall(r"rank 0 of (\d) from step (\d+)", done.stdout)
    left = [(str(ranks - 1), str(kill[1]))] if kill else []
    assert formed == [(str(ranks), "0"), *left]


@pytest.mark.parametrize("moment", ["in a step", "while the group forms", "on another node"])
def test_one_is_killed_and_one_joins(moment, waiting, request):
    """The new rank gets Adam's state, too: the digits show it. Nothing is left behind."""
    own, nodes, address = [], {}, "127.0.0.1"
    if moment == "while the group forms":
        own = [(FORM, f"            if me == 1:\n                os.kill(os.getpid(), 9)\n{FORM}")]
    if moment == "on another node":
        both = request.getfixturevalue("nodes")
        nodes = {"first": {"node": (both, 0)}, "new": {"node": (both, 1)}}
        address = ADDRESSES[0]
    copy, gate = waiting(*own)
    where = (*GRACE, "-ip", address, "--port", free_port())
    job = Lesson(copy, *FLAGS, *where, "--timeout", 5 if own else 60, **nodes.get("first", {}))
    count = 2 if own else 3
    text = read_until(job, rf"rank \d of {count} from step", count)
    if not own:
        os.kill(processes(text)[1], signal.SIGKILL)
    new = Lesson(copy, "--join", *where, **nodes.get("new", {}))
    text += read_until(job, r"rank \d of 3 from step", 2)
    gate.touch()
    joined = new.wait()
    assert joined.returncode == 0, joined.stderr
    assert "rank 2 of 3 from step" in joined.stdout
    done = job.wait()
    assert done.returncode == 0, done.stderr
    assert_right(text + done.stdout)


def test_one_is_paused(waiting):
    """The others continue without it. When it continues, it is taken in, and spoils nothing."""
    back = WAIT.format(step=2 * STEP, until="dist.get_world_size() == 2")
    copy, gate = waiting((KILL, back + KILL))
    job = Lesson(copy, *FLAGS, *GRACE, "--port", free_port(), "--timeout", 10)
    text = read_until(job, r"rank \d of 3 from step", 3)
    paused = processes(text)[0]
    os.kill(paused, signal.SIGSTOP)
    gate.touch()
    text += read_until(job, r"rank \d of 2 from step", 2)
    os.kill(paused, signal.SIGCONT)
    text += read_until(job, rf"rank \d of 3 from step {2 * STEP}", 3)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    assert_right(text + done.stdout)


def test_what_cannot_continue():
    """All ranks are killed; there is no run to join; the port is taken. The last line says it."""
    port = free_port()
    job = Lesson("survivors", *FLAGS, "--port", port, "--epochs", 100_000)
    text = read_until(job, r"rank \d of 3 from step", 3)
    done = run("survivors", *FLAGS, "--port", port, status=1)
    assert done.stderr.strip().endswith(f"cannot listen at --port {port}: use a free one.")
    for pid in processes(text):
        os.kill(pid, signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 1 and "terminated with signal SIGKILL" in done.stderr
    done = run("survivors", "--join", "--port", port, "--timeout", 1, status=1)
    assert done.stderr.strip().endswith(f"There is no run at -ip 127.0.0.1 --port {port}.")
