"""run/mpirun.sh with Open MPI and with MPICH, over ssh between two nodes."""

import os
import re
import signal

import pytest
from conftest import LONG, ROOT, SHORT, Job, epochs, one_line, one_process
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


def mpirun(sshd, kind, *command, **env):
    """Start the script on node 0, from another folder."""
    need(kind)
    env = {"MPIRUN": kind, "SSH": sshd.command, "GPUS": "1"} | env
    return Job(*sshd.nodes.enter(0), ROOT / "run" / "mpirun.sh", *command, env=env, cwd="/")


@pytest.fixture(params=KINDS, ids=KINDS.values())
def start(request, sshd):
    """A function that runs the script with Open MPI or MPICH. A test must leave no process."""
    yield lambda *command, **env: mpirun(sshd, request.param, *command, **env)
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


def test_which_variables_are_passed(start, tmp_path):
    """The variables of NCCL, gloo and torch are passed to the nodes, but not the choice of GPUs."""
    script = tmp_path / "variables.py"
    script.write_text(VARIABLES)
    done = start(os.path.relpath(script, ROOT), **TRAVEL, **STAYS).wait()
    assert done.returncode == 0, done.stderr
    seen = dict(re.findall(r"(node\d): (\{.*\})", done.stdout))
    assert seen == {HOSTS[0]: str(TRAVEL | STAYS), HOSTS[1]: str(TRAVEL)}, done.stdout


def test_what_each_rank_is_told_and_ctrl_c(start):
    """Each of two ranks on each of two nodes gets its place, and a flag with a space.

    After Ctrl-C no process stays on either node.
    """
    job = start(LIGHT, "--wait", "a folder/c.pt", GPUS="2")
    text = read_until(job, r"^rank \d waits$", 4)
    flags = ", flags ['--wait', 'a folder/c.pt']"
    assert sorted(re.findall("^rank .* of .*", text, re.M)) == [place + flags for place in PLACES]
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode == 130


def test_what_is_missing_is_one_line(sshd):
    """Each mistake ends in one line, which has what to do."""
    host = ("node9", "HOSTS", "/etc/hosts")
    login = ("log in to node1", "refused", "try ssh -p 2 node1")
    install = ("no-mpirun is missing", "apt-get install openmpi-bin")
    by_ssh = ("starts its own", f'HOSTS="a b" run/two_nodes_ssh.sh {SPAWNING}, or use')
    for status, command, env, words in (
        (1, (LESSON,), {"HOSTS": "node0 node9"}, host),
        (1, (LESSON,), {"SSH": "ssh -p 2"}, login),
        (1, (LESSON,), {"MPIRUN": "no-mpirun"}, install),
        (1, (LESSON,), {"MPIRUN": "true"}, ("neither", "MPIRUN=mpirun.openmpi")),
        (1, (LESSON,), {"PYTHON": "/no/python"}, ("/no/python", "run/setup.sh")),
        (2, (), {}, ("no lesson", LESSON)),
        (2, ("--epochs", 1), {}, ("--epochs", "playground/*.py")),
        (2, (SPAWNING,), {"HOSTS": "a b"}, by_ssh),
    ):
        done = mpirun(sshd, "mpirun.openmpi", *command, **env).wait()
        assert done.returncode == status, done.stderr
        one_line(done, *words)
