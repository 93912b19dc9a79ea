"""run/torchrun_node.sh on two nodes, the same command on both.

test_faults.py trains with it.
"""

import os
import re
import signal

from launch import Job
from lessons import ROOT
from nodes import ADDRESSES, FLAGS, HOSTS, LIGHT, check_places, need, read_until

SCRIPT = ROOT / "run" / "torchrun_node.sh"


def start(nodes, node, node0, *command, **env):
    """Start the script on a node."""
    env = {"NODE0": node0, "WAIT": "300"} | env
    return Job(*nodes.enter(node), SCRIPT, *command, env=env, cwd="/")


def wait_for_ranks(jobs, *flags):
    """Read what both nodes print until their four ranks wait, and check it."""
    check_places("".join(read_until(job, r"^rank \d waits$", 2) for job in jobs), *flags)


def test_a_restart_and_ctrl_c(nodes):
    """With RESTARTS=1, the ranks start again after one of them is killed.

    After Ctrl-C on one node, the other one fails, and no process is left.
    """
    flags = ("--device", "cpu", "--wait")
    jobs = [start(nodes, node, HOSTS[0], LIGHT, *flags, RESTARTS="1") for node in range(2)]
    wait_for_ranks(jobs, *flags)
    os.kill(nodes.ranks()[3], signal.SIGKILL)
    wait_for_ranks(jobs, *flags)
    os.killpg(jobs[1].process.pid, signal.SIGINT)
    assert [job.wait().returncode for job in jobs] == [1, 1]
    assert nodes.left() == []


def test_no_rank_outlives_torchrun(nodes):
    """kill -9 of torchrun leaves no rank on its node, although torchrun cannot end them."""
    jobs = [start(nodes, node, ADDRESSES[0], LIGHT, *FLAGS) for node in range(2)]
    wait_for_ranks(jobs, *FLAGS)
    jobs[1].process.kill()
    assert jobs[1].wait().returncode == -signal.SIGKILL
    jobs[0].process.terminate()
    jobs[0].wait()
    assert nodes.left() == []


def test_a_node_that_never_comes(nodes):
    """No node waits longer than WAIT seconds, neither the one at NODE0 nor the other."""
    jobs = []
    for node, port in enumerate(("29500", "29501")):
        jobs.append(start(nodes, node, ADDRESSES[0], LIGHT, *FLAGS, WAIT="4", PORT=port))
    for done in [job.wait() for job in jobs]:
        assert done.returncode == 1
        assert "Rendezvous" in done.stderr.splitlines()[-1]


def test_a_machine_without_a_network():
    """It has only the loopback interface, and its own name has no address."""
    need("ip")
    alone = 'ip link set lo up && hostname laptop7 && exec "$@"'
    command = ("unshare", "--net", "--uts", "sh", "-c", alone, "sh", SCRIPT, LIGHT)
    done = Job(*command, env={"NODE0": "127.0.0.1", "NODES": "1"}).wait()
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^rank \d of 2", done.stdout, re.M)) == ["rank 0 of 2", "rank 1 of 2"]
