"""run/mpirun.sh with Open MPI and with MPICH, over ssh between two nodes."""

import os
import re
import signal
import time

import pytest
from conftest import PLACE, PLACES, ROOT, SHORT, Job, epochs, one_process
from nodes import HOSTS, STAYS, TRAVEL, VARIABLES, Nodes, need
from sshd import Sshd

KINDS = {"mpirun.openmpi": "Open MPI", "mpiexec.hydra": "MPICH"}
LESSON = "playground/distributed_data_parallel_torchrun.py"
SPAWNING = "playground/distributed_data_parallel.py"
LONG = (*SHORT[:-1], 100_000)


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """Two nodes with ssh servers for all tests of this file."""
    with Nodes() as nodes, Sshd(nodes, tmp_path_factory.mktemp("sshd")) as sshd:
        yield sshd


@pytest.fixture(params=KINDS, ids=KINDS.values())
def start(request, sshd):
    """A function that runs the script on node 0 with one of the two kinds of mpirun; leaves nothing on the nodes."""
    need(request.param)

    def start(*command, **env):
        env = {"MPIRUN": request.param, "SSH": sshd.command, "GPUS": "1"} | env
        return Job(*sshd.nodes.enter(0), ROOT / "run" / "mpirun.sh", *command, env=env, cwd="/")

    yield start
    assert left(sshd) == []


def left(sshd, seconds=10):
    """Return the processes on both nodes that are no ssh servers and don't end within some time."""
    end = time.monotonic() + seconds
    while (pids := {*sshd.nodes.pids(0), *sshd.nodes.pids(1)} - set(sshd.pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return sorted(pids)


def test_two_nodes(start, tmp_path):
    """Two nodes with two ranks each print single_gpu.py's numbers, and a flag with a space survives.

    Every rank knows its place on its node.
    """
    checkpoint = tmp_path / "a folder" / "c.pt"
    done = start(LESSON, *SHORT, "-s", checkpoint, GPUS="2").wait()
    assert done.returncode == 0, done.stderr
    assert checkpoint.exists()
    table = re.findall(r"^(\d) +(\d) +(\d) +cpu +\d+ +(\S+)$", done.stdout, re.M)
    places = [("0", "0", "0"), ("0", "1", "1"), ("1", "2", "0"), ("1", "3", "1")]
    assert table == [(*place, host) for place, host in zip(places, sorted(HOSTS * 2), strict=True)]
    assert epochs(done.stdout) == one_process(*SHORT)


def test_what_mpirun_tells_each_rank(start, tmp_path):
    """All that a launcher says of a rank's place, as torchrun would."""
    script = tmp_path / "place.py"
    script.write_text(PLACE)
    done = start(os.path.relpath(script, ROOT), GPUS="2").wait()
    assert sorted(re.findall(r"rank \d of \d, on its node \d of \d, node \d", done.stdout)) == PLACES, done.stderr


def test_which_variables_travel(start, tmp_path):
    """What NCCL, gloo and torch are told here is told on both nodes; which GPUs are used is for each node to say."""
    script = tmp_path / "variables.py"
    script.write_text(VARIABLES)
    done = start(os.path.relpath(script, ROOT), **TRAVEL, **STAYS).wait()
    assert done.returncode == 0, done.stderr
    seen = dict(re.findall(r"(node\d): (\{.*\})", done.stdout))
    assert seen == {HOSTS[0]: str(TRAVEL | STAYS), HOSTS[1]: str(TRAVEL)}, done.stdout


def test_a_point_to_point_lesson(start):
    """Ranks of two nodes send each other numbers; flags of the lesson's own are passed on."""
    done = start("playground/blocking_p2p.py", "--device", "cpu", "--deadlock").wait()
    assert done.returncode == 0, done.stderr
    assert "rank 1: batch_isend_irecv: received 0" in done.stdout


@pytest.mark.parametrize("how", ["rank", signal.SIGINT, signal.SIGTERM])
def test_the_end_of_one_is_the_end_of_all(how, start):
    """A rank on the other node is killed, or Ctrl-C or SIGTERM ends the script: nothing is left on either node."""
    job = start(LESSON, *LONG)
    victim = job.ranks(2)[1]
    assert any(line.startswith("epoch") for line in job.process.stdout)  # they are connected
    if how == "rank":
        os.kill(victim, signal.SIGKILL)
    else:
        os.killpg(job.process.pid, how)
    done = job.wait()
    if how == "rank":
        assert done.returncode > 0
        assert "error: a rank failed" in done.stderr
    else:
        assert done.returncode == 128 + how


def test_backend_mpi(start):
    """PyTorch's wheels have no MPI: the flag reaches the lesson, whose own line says what to use."""
    done = start("playground/blocking_p2p.py", "--device", "cpu", "--backend", "mpi").wait()
    assert done.returncode > 0
    assert "error: this torch is built without mpi: use --backend gloo" in done.stderr


def test_what_is_missing_is_one_line(start):
    """An unknown host, one that lets nobody in, no lesson, no mpirun, another program under its name, no Python."""
    for status, command, env, words in (
        (1, (LESSON,), {"HOSTS": "node0 node9"}, ("node9", "HOSTS", "/etc/hosts")),
        (1, (LESSON,), {"SSH": "ssh -p 2"}, ("log in to node1", "refused", "try ssh -p 2 node1")),
        (1, (LESSON,), {"MPIRUN": "no-mpirun"}, ("no-mpirun is missing", "apt-get install openmpi-bin")),
        (1, (LESSON,), {"MPIRUN": "true"}, ("neither", "MPIRUN=mpirun.openmpi")),
        (1, (LESSON,), {"PYTHON": "/no/python"}, ("/no/python", "run/setup.sh")),
        (2, (), {}, ("no lesson", LESSON)),
        (2, ("--epochs", 1), {}, ("--epochs", "playground/*.py")),
        (2, (SPAWNING,), {"HOSTS": "a b"}, ("starts its own", f'HOSTS="a b" run/two_nodes_ssh.sh {SPAWNING}, or use')),
        (2, ("playground/single_gpu.py",), {}, ("is a single process", "python playground/single_gpu.py")),
    ):
        done = start(*command, **env).wait()
        lines = done.stderr.splitlines()
        assert (done.returncode, len(lines)) == (status, 1), done.stderr
        for word in ("error: ", *words):
            assert word in lines[0], lines[0]
