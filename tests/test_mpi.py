"""run/mpirun.sh with Open MPI and with MPICH, over ssh between two nodes."""

import os
import signal

import pytest
from launch import Job
from lessons import ROOT
from nodes import FLAGS, HOSTS, LIGHT, STAYS, TRAVEL, check_places, need, read_until, variables


def mpirun(sshd, kind, *command, **env):
    """Start the script on node 0, from another folder."""
    need(kind)
    env = {"MPIRUN": kind, "SSH": sshd.command} | env
    return Job(*sshd.nodes.enter(0), ROOT / "run" / "mpirun.sh", *command, env=env, cwd="/")


@pytest.mark.parametrize("kind", ["mpirun.openmpi", "mpiexec.hydra"])
def test_what_each_rank_is_told_and_what_ends_all(kind, sshd):
    """Each rank gets its place, the flags, and the variables of NCCL, gloo and torch.

    When a rank is killed, and after Ctrl-C, no process stays on either node.
    """

    def start():
        job = mpirun(sshd, kind, LIGHT, *FLAGS, **TRAVEL, **STAYS)
        text = read_until(job, r"^rank \d waits$", 4)
        check_places(text, *FLAGS)
        # The choice of GPUs is not passed to the other node.
        assert variables(text) == {HOSTS[0]: str(TRAVEL | STAYS), HOSTS[1]: str(TRAVEL)}
        return job

    job = start()
    os.kill(sshd.nodes.ranks()[3], signal.SIGKILL)
    assert job.wait().returncode > 0
    assert sshd.left() == []
    job = start()
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode > 0
    assert sshd.left() == []


def test_a_host_that_cannot_be_reached(sshd):
    """No rank starts. MPICH by itself would wait for it forever."""
    for kind in ("mpirun.openmpi", "mpiexec.hydra"):
        done = mpirun(sshd, kind, LIGHT, *FLAGS, HOSTS="node0 node7").wait()
        assert done.returncode == 255
        assert "Could not resolve hostname node7: " in done.stderr
        assert "rank" not in done.stdout


@pytest.mark.parametrize("kind", ["mpirun.openmpi", "mpiexec.hydra"])
def test_the_port(kind, sshd):
    """Each rank is told it."""
    done = mpirun(sshd, kind, "MASTER_PORT", PYTHON="printenv", PORT="8889").wait()
    assert done.stdout.split() == ["8889"] * 4, done.stderr
