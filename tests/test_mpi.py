"""run/mpirun.sh with Open MPI and with MPICH, over ssh between two nodes."""

import os
import re
import signal

import pytest
from conftest import LONG, ROOT, SHORT, Job, epochs, one_process
from nodes import HOSTS, LIGHT, PATIENT, PLACES, STAYS, TRAVEL, VARIABLES, Nodes, need, read_until
from sshd import Sshd

KINDS = {"mpirun.openmpi": "Open MPI", "mpiexec.hydra": "MPICH"}
LESSON = "playground/distributed_data_parallel_torchrun.py"
SPAWNING = "playground/distributed_data_parallel.py"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """Two nodes with ssh servers for all tests of this file."""
    with Nodes() as nodes, Sshd(nodes, tmp_path_factory.mktemp("sshd")) as sshd:
        yield sshd


@pytest.fixture(params=KINDS, ids=KINDS.values())
def start(request, sshd):
    """A function that runs the script on node 0 with Open MPI or MPICH.

    A test must leave no process on the nodes.
    """
    need(request.param)

    def start(*command, **env):
        env = {"MPIRUN": request.param, "SSH": sshd.command, "GPUS": "1"} | env
        return Job(*sshd.nodes.enter(0), ROOT / "run" / "mpirun.sh", *command, env=env, cwd="/")

    yield start
    assert sshd.left() == []


def test_training_until_a_rank_is_killed(start, sshd):
    """Two nodes with a rank each print the numbers of single_gpu.py.

    When the rank of node 1 is killed, no process stays on either node.
    """
    job = start(LESSON, *SHORT[:-1], LONG[-1], *PATIENT)
    text = read_until(job, r"^epoch 2/")
    assert "2 ranks, gloo, cpu\n" in text
    pids = sshd.nodes.ranks()
    assert epochs(text)[:1] == one_process(*SHORT)
    os.kill(pids[1], signal.SIGKILL)
    done = job.wait()
    assert done.returncode > 0
    assert "error: a rank or mpirun failed" in done.stderr


def test_what_mpirun_tells_each_rank(start):
    """Each of two ranks on each of two nodes gets its place, and a flag with a space."""
    done = start(LIGHT, "--flag", "a folder/c.pt", GPUS="2").wait()
    assert done.returncode == 0, done.stderr
    flags = ", flags ['--flag', 'a folder/c.pt']"
    assert sorted(done.stdout.splitlines()) == [place + flags for place in PLACES], done.stderr


def test_which_variables_are_passed(start, tmp_path):
    """The variables of NCCL, gloo and torch are passed to the nodes, but not the choice of GPUs."""
    script = tmp_path / "variables.py"
    script.write_text(VARIABLES)
    done = start(os.path.relpath(script, ROOT), **TRAVEL, **STAYS).wait()
    assert done.returncode == 0, done.stderr
    seen = dict(re.findall(r"(node\d): (\{.*\})", done.stdout))
    assert seen == {HOSTS[0]: str(TRAVEL | STAYS), HOSTS[1]: str(TRAVEL)}, done.stdout


def test_a_point_to_point_lesson(start):
    """Ranks of two nodes send numbers to each other, and the lesson gets its own flags."""
    done = start("playground/blocking_p2p.py", "--device", "cpu", "--deadlock", *PATIENT).wait()
    assert done.returncode == 0, done.stderr
    assert "rank 1: even ranks send first: received 0" in done.stdout


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_the_end_of_the_script_is_the_end_of_all(sign, start):
    """After Ctrl-C or SIGTERM, no process stays on either node."""
    job = start(LIGHT, "--wait", GPUS="2")
    read_until(job, r"^rank \d waits$", 4)
    os.killpg(job.process.pid, sign)
    assert job.wait().returncode == 128 + sign


def test_backend_mpi(start):
    """PyTorch's wheels are built without MPI, so the lesson refuses the flag."""
    flags = ("--device", "cpu", "--backend", "mpi")
    done = start("playground/blocking_p2p.py", *flags, HOSTS="node0").wait()
    assert done.returncode > 0
    assert "error: this PyTorch has no backend mpi: leave --backend out" in done.stderr


def test_what_is_missing_is_one_line(start):
    """Each of nine mistakes ends in one line, which has what to do."""
    by_ssh = f'HOSTS="a b" run/two_nodes_ssh.sh {SPAWNING}, or use'
    alone = "python playground/single_gpu.py"
    for status, command, env, words in (
        (1, (LESSON,), {"HOSTS": "node0 node9"}, ("node9", "HOSTS", "/etc/hosts")),
        (1, (LESSON,), {"SSH": "ssh -p 2"}, ("log in to node1", "refused", "try ssh -p 2 node1")),
        (
            1,
            (LESSON,),
            {"MPIRUN": "no-mpirun"},
            ("no-mpirun is missing", "apt-get install openmpi-bin"),
        ),
        (1, (LESSON,), {"MPIRUN": "true"}, ("neither", "MPIRUN=mpirun.openmpi")),
        (1, (LESSON,), {"PYTHON": "/no/python"}, ("/no/python", "run/setup.sh")),
        (2, (), {}, ("no lesson", LESSON)),
        (2, ("--epochs", 1), {}, ("--epochs", "playground/*.py")),
        (2, (SPAWNING,), {"HOSTS": "a b"}, ("starts its own", by_ssh)),
        (2, ("playground/single_gpu.py",), {}, ("is a single process", alone)),
    ):
        done = start(*command, **env).wait()
        lines = done.stderr.splitlines()
        assert (done.returncode, len(lines)) == (status, 1), done.stderr
        for word in ("error: ", *words):
            assert word in lines[0], lines[0]
