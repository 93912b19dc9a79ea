"""run/torchrun_node.sh on two nodes, the same command on both."""

import os
import re
import signal
import socket
import sys

import psutil
from conftest import LONG, ROOT, SHORT, Job, epochs, free_port, one_line, one_process
from nodes import ADDRESSES, HOSTS, LIGHT, PATIENT, PLACES, read_until

LESSON = ("playground/distributed_data_parallel_torchrun.py", *SHORT)
SPAWNING = ("playground/distributed_data_parallel.py", *SHORT)
SCRIPT = ROOT / "run" / "torchrun_node.sh"


def start(nodes, index, node0, *command, **env):
    """Start the script on a node, with one process unless GPUS says otherwise."""
    env = {"NODE0": node0, "GPUS": "1", "WAIT": "300"} | env
    return Job(*nodes.enter(index), SCRIPT, *(command or LESSON), env=env, cwd="/")


def test_training_with_a_restart(nodes):
    """A rank is killed, and the second start has the numbers of single_gpu.py.

    RESTARTS=1, so the next rank that is killed ends both nodes. No process is left.
    """
    flags = (*LESSON[:-1], LONG[-1], *PATIENT)
    zero, one = (start(nodes, index, ADDRESSES[0], *flags, RESTARTS="1") for index in range(2))
    read_until(zero, r"^2 ranks, gloo, cpu\n")
    os.kill(nodes.ranks()[1], signal.SIGKILL)
    read_until(zero, r"^2 ranks, gloo, cpu\n")
    pids = nodes.ranks()
    assert epochs(read_until(zero, r"^epoch 1/.*\n"))[:1] == one_process(*SHORT)
    os.kill(pids[1], signal.SIGKILL)
    done = [zero.wait(), one.wait()]
    assert [each.returncode for each in done] == [1, 1], done
    assert done[1].stderr.splitlines()[-1].startswith("error: ")
    assert nodes.left() == []


def start_both(nodes):
    """Start two ranks on each node, which wait, with node 0 given by name. Returns both jobs."""
    jobs = [start(nodes, index, HOSTS[0], LIGHT, "--wait", GPUS="2") for index in range(2)]
    printed = "".join(read_until(job, r"^rank \d waits$", 2) for job in jobs)
    assert sorted(re.findall("^(rank .*), flags", printed, re.M)) == PLACES
    return jobs


def test_ctrl_c_on_one_node_ends_the_other(nodes):
    """The other node fails, and no process is left."""
    zero, one = start_both(nodes)
    os.killpg(one.process.pid, signal.SIGINT)
    assert [zero.wait().returncode, one.wait().returncode] == [1, 130]
    assert nodes.left() == []


def test_no_rank_outlives_torchrun(nodes):
    """kill -9 of torchrun leaves no rank on its node, although torchrun cannot end them."""
    zero, one = start_both(nodes)
    for process in map(psutil.Process, nodes.pids(1)):
        if process.cmdline()[2:3] == ["torch.distributed.run"]:
            process.kill()
    assert one.wait().returncode == 128 + signal.SIGKILL
    zero.process.terminate()
    assert zero.wait().returncode == 128 + signal.SIGTERM
    assert nodes.left() == []


def test_a_node_that_never_comes(nodes):
    """No node waits longer than WAIT seconds, neither the one at NODE0 nor the other."""
    for index in range(2):
        done = start(nodes, index, ADDRESSES[0], WAIT="4").wait()
        assert done.returncode == 1
        assert "start all nodes within 4 s" in done.stderr.splitlines()[-1]


def test_what_is_missing_is_one_line():
    """No lesson, a flag in its place, no NODE0, an unknown one, no Python, a port that is taken."""
    host = {"NODE0": "localhost"}
    unknown = {"NODE0": "no-such-node"}
    single = ("playground/single_gpu.py",)
    by_ssh = ("starts its own processes", 'HOSTS="node0 node1" run/two_nodes_ssh.sh')
    for status, command, env, words in (
        (2, (), host, ("NODE0=", "playground/")),
        (2, LESSON, {}, ("NODE0=", "playground/")),
        (2, ("--epochs", 1), host, ("--epochs", "playground/*.py")),
        (2, SPAWNING, host, by_ssh),
        (2, single, host, ("is a single process", *single)),
        (1, LESSON, unknown, ("no-such-node", "NODE0=10.0.0.1")),
        (1, LESSON, host | {"PYTHON": "/no/python"}, ("/no/python", "run/setup.sh")),
    ):
        done = Job(SCRIPT, *command, env=env).wait()
        assert done.returncode == status
        one_line(done, *words)
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        done = Job(SCRIPT, *LESSON, env={"NODE0": "localhost", "PORT": str(port)}).wait()
    assert done.returncode == 1
    one_line(done, f"port {port} is in use", f"PORT={port + 1}")


PLAYED = """#!/usr/bin/env bash
# Stands for Python: it says whether there is a GPU, and shows the log level that torchrun gets.
case "$*" in
    *is_available*) exit "$NO_GPU" ;;
    *torch.distributed.run*) echo "level ${TORCH_CPP_LOG_LEVEL:-unset}" ;;
    *) exec "$REAL" "$@" ;;
esac
"""


def test_only_the_log_of_gloo_is_off(tmp_path):
    """NCCL logs why it ends a process."""
    python = tmp_path / "python"
    python.write_text(PLAYED)
    python.chmod(0o755)
    for no_gpu, flags, level, expected in (
        ("1", (), None, "FATAL"),
        ("1", (), "INFO", "INFO"),
        ("0", ("--device", "cpu"), None, "FATAL"),
        ("0", ("--device", "cuda"), None, "unset"),
    ):
        env = {"NODE0": "localhost", "PORT": str(free_port()), "TORCH_CPP_LOG_LEVEL": level}
        env |= {"PYTHON": str(python), "REAL": sys.executable, "NO_GPU": no_gpu}
        done = Job(SCRIPT, LESSON[0], *flags, env=env).wait()
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"level {expected}\n"
