"""run/torchrun_node.sh on two nodes, the same command on both."""

import os
import signal
import socket

import pytest
from conftest import ROOT, SHORT, Job, epochs, one_process
from nodes import ADDRESSES, HOSTS

LESSON = ("playground/distributed_data_parallel_torchrun.py", *SHORT)
SPAWNING = ("playground/distributed_data_parallel.py", *SHORT)
SCRIPT = ROOT / "run" / "torchrun_node.sh"


def start(nodes, index, node0, *command, **env):
    """Start the script on a node, with one process unless GPUS says otherwise."""
    env = {"NODE0": node0, "GPUS": "1", "WAIT": "60"} | env
    return Job(*nodes.enter(index), SCRIPT, *(command or LESSON), env=env, cwd="/")


def one_line(done, *words):
    """Check that the script wrote one error line and nothing else."""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0], lines[0]


@pytest.mark.parametrize(("node0", "gpus"), [(ADDRESSES[0], 2), (HOSTS[0], 1)])
def test_two_nodes(node0, gpus, nodes):
    """Node 0 given by address and by name: two nodes print single_gpu.py's numbers, and no process stays."""
    jobs = [start(nodes, index, node0, GPUS=str(gpus)) for index in (1, 0)]
    done = [job.wait() for job in jobs]
    assert [one.returncode for one in done] == [0, 0], done
    table = [row.split() for one in done for row in one.stdout.splitlines() if row.endswith(tuple(HOSTS))]
    assert sorted((row[2], row[5]) for row in table) == [(str(rank), host) for rank in range(gpus) for host in HOSTS]
    assert epochs("".join(one.stdout for one in done)) == one_process(*SHORT)
    assert nodes.pids(0) + nodes.pids(1) == []


def test_a_point_to_point_lesson(nodes):
    """Ranks of two nodes send each other numbers; flags of the lesson's own are passed on."""
    command = ("playground/nonblocking_p2p.py", "--device", "cpu")
    jobs = [start(nodes, index, ADDRESSES[0], *command) for index in range(2)]
    done = [job.wait() for job in jobs]
    assert [one.returncode for one in done] == [0, 0], done
    assert "ring, rank 1: " in done[0].stdout + done[1].stdout


def test_a_restart(nodes):
    """With RESTARTS=1 the ranks of both nodes start again after one was killed, and arrive at the same numbers."""
    zero, one = (start(nodes, index, ADDRESSES[0], RESTARTS="1") for index in range(2))
    os.kill(zero.ranks(2)[1], signal.SIGKILL)  # the second in the table is on the other node
    done = [zero.wait(), one.wait(180)]
    assert [each.returncode for each in done] == [0, 0], done
    assert epochs(done[0].stdout + done[1].stdout) == one_process(*SHORT)


@pytest.mark.parametrize(("how", "status"), [("rank", 1), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_end_of_one_node_ends_the_other(how, status, nodes):
    """A rank is killed, or Ctrl-C or SIGTERM ends the script: the other node stops too, and no process is left."""
    zero, one = (start(nodes, index, ADDRESSES[0], *LESSON[:-1], 100_000) for index in range(2))
    victim = zero.ranks(2)[1]  # the ranks are numbered in the order of the addresses
    assert any(line.startswith("epoch") for line in zero.process.stdout)  # they are connected
    if how == "rank":
        os.kill(victim, signal.SIGKILL)
    else:
        os.killpg(one.process.pid, how)
    done = [zero.wait(), one.wait(180)]
    assert [each.returncode for each in done] == [1, status], done
    if how == "rank":
        assert done[1].stderr.splitlines()[-1].startswith("error: ")
    assert nodes.pids(0) + nodes.pids(1) == []


def test_a_node_that_never_comes(nodes):
    """Neither the node that serves the rendezvous nor the one that looks for it waits longer than WAIT seconds."""
    for index in range(2):
        done = start(nodes, index, ADDRESSES[0], WAIT="4").wait()
        assert done.returncode == 1
        assert "start all nodes within 4 s" in done.stderr.splitlines()[-1]


def test_what_is_missing_is_one_line():
    """No lesson, a flag in its place, no NODE0, an unknown one, no Python, a port that is taken."""
    for status, command, env, words in (
        (2, (), {"NODE0": "localhost"}, ("NODE0=", "playground/")),
        (2, LESSON, {}, ("NODE0=", "playground/")),
        (2, ("--epochs", 1), {"NODE0": "localhost"}, ("--epochs", "playground/*.py")),
        (2, SPAWNING, {"NODE0": "localhost"}, ("starts its own processes", 'HOSTS="node0 node1" run/two_nodes_ssh.sh')),
        (2, ("playground/single_gpu.py",), {"NODE0": "localhost"}, ("is a single process", "playground/single_gpu.py")),
        (1, LESSON, {"NODE0": "no-such-node"}, ("no-such-node", "NODE0=10.0.0.1")),
        (1, LESSON, {"NODE0": "localhost", "PYTHON": "/no/python"}, ("/no/python", "run/setup.sh")),
    ):
        done = Job(SCRIPT, *command, env=env).wait()
        assert done.returncode == status
        one_line(done, *words)
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        done = Job(SCRIPT, *LESSON, env={"NODE0": "localhost", "PORT": str(port)}).wait()
    assert done.returncode == 1
    one_line(done, f"port {port} is in use", f"PORT={port + 1}")
