"""Faults between two nodes.

Some are survived. All others end the run in bounded time, with a last line that says what was seen.
The nodes are network namespaces. tests/README.md has a table of the faults.
"""

import os
import re
import signal
import sys
import time

from launch import (
    DIGITS,
    LONG,
    Job,
    Lesson,
    each_epoch,
    epochs,
    one_process,
    python_path,
    run,
    wait_for_epoch,
)
from lessons import ROOT
from nodes import ADDRESSES, read_until
from test_errors import COME, told
from test_resumable import assert_same_parameters

DDP = "distributed_data_parallel"
RESUMABLE = "resumable"
SHORT = (*DIGITS, "--batch_size", 120)


def on_both(nodes, lesson, *flags, ranks=1, cold=False):
    """Start a lesson on both nodes."""
    flags = (*flags, "-n", 2, "-g", ranks, "-ip", ADDRESSES[0])
    jobs = []
    for index in range(2):
        jobs.append(Lesson(lesson, *flags, "-nr", index, node=(nodes, index), cold=cold))
    return jobs


def ends(nodes, *jobs):
    """Wait for jobs that must fail, and check that no process stays on a node."""
    done = [job.wait() for job in jobs]
    assert [each.returncode for each in done] == [1] * len(done), [each.stderr for each in done]
    assert nodes.pids(0) + nodes.pids(1) == []
    return done


def both_end(zero, one):
    """Wait for both nodes, which must end without an error. Returns what node 0 has printed."""
    done = [zero.wait(), one.wait()]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    return done[0].stdout


def test_a_node_without_the_others(nodes):
    """After --timeout it says what to start.

    No machine has the address, there is no route to it, the name has no address, or node 1 never
    starts. Or both nodes have -nr 1.
    """
    jobs, expected = [], []
    for node, number, address, port in (
        (1, 1, "10.77.0.9", 29500),
        (1, 1, "192.0.2.1", 29500),
        (1, 1, "nosuchnode", 29500),
        (0, 0, ADDRESSES[0], 29500),
        (0, 1, ADDRESSES[0], 8889),
        (1, 1, ADDRESSES[0], 8889),
    ):
        flags = (*SHORT, "-n", 2, "-g", 1, "-nr", number, "-ip", address, "--port", port)
        jobs.append(Lesson(DDP, *flags, "--timeout", 5, node=(nodes, node)))
        expected.append(COME.format(2, address, port))
    for done, words in zip(ends(nodes, *jobs), expected, strict=True):
        told(done, words)


def test_the_link_is_cut_for_good(nodes):
    """When the link is cut during training, both nodes end after --timeout."""
    zero, one = on_both(nodes, DDP, *LONG, "--timeout", 10)
    read_until(zero, "^epoch 3/")
    nodes.link("down")
    for done in ends(nodes, zero, one):
        told(done, "RuntimeError: ")
        assert re.search("Timed out waiting|by peer", done.stderr)


def test_a_slow_link_is_gone_for_8_seconds(nodes, tmp_path):
    """With 100 Mbit/s, and a pause in the second epoch, the run ends with the same numbers."""
    nodes.bandwidth("100mbit")
    flags = (*SHORT, "--epochs", 3)
    wait = f"while epoch == 2 and not Path('{tmp_path}/down').exists(): time.sleep(0.1)"
    zero, one = on_both(nodes, each_epoch(DDP, wait, tmp_path), *flags)
    read_until(zero, "^epoch 2/")
    nodes.link("down")
    (tmp_path / "down").touch()
    time.sleep(8)
    nodes.link("up")
    assert epochs(both_end(zero, one))[-1] == one_process(*flags)[-1]


def test_a_rank_is_killed(nodes):
    """Its own node names the rank and the signal. The other node has lost its connection."""
    zero, one = on_both(nodes, DDP, *LONG, ranks=2)
    pids = zero.ranks(4)
    read_until(zero, "^epoch 1/")
    os.kill(pids[0], signal.SIGKILL)
    done = ends(nodes, zero, one)
    # A rank on the same node may find its connection closed before the kill is noticed.
    killed = "process 0 terminated with signal SIGKILL"
    assert re.search(f"{killed}|by peer", done[0].stderr.strip().splitlines()[-1])
    told(done[1], "by peer")


def test_a_whole_node_is_lost(nodes):
    """All processes of node 1 are killed at once, as by a power failure. Node 0 ends."""
    zero, one = on_both(nodes, DDP, *LONG)
    read_until(zero, "^epoch 1/")
    for pid in nodes.pids(1):
        os.kill(pid, signal.SIGKILL)
    one.wait()
    [done] = ends(nodes, zero)
    told(done, "by peer")


def test_ctrl_c_on_one_node(nodes):
    """The other node reports that a rank has ended, and where to look."""
    zero, one = on_both(nodes, DDP, *LONG, cold=True)
    read_until(zero, "^epoch 1/")
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.wait().returncode == 130
    [done] = ends(nodes, zero)
    told(done, "by peer")


TORCHRUN = f"""#!/usr/bin/env bash
# torchrun with one node waits 30 s for the second one. Here it waits 5 s.
exec {sys.executable} "${{@/#is_host=/last_call_timeout=5,is_host=}}"
"""


def test_a_node_lost_and_back(nodes, tmp_path):
    """With NODES=1:2, node 0 continues alone when node 1 is lost, and with node 1 when it is back.

    The run ends with the parameters of a single process. Both ranks wait for the loss after the
    first epoch, and rank 0 waits for node 1 before that, and after the second epoch.
    """
    flags = (*SHORT, "--double", "--epochs", 3)
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "run"
    alone = run(RESUMABLE, *flags, "--run_dir", undisturbed, processes=1)
    wait = "while (epoch, dist.get_world_size()) in ((0, 1), (1, 2), (2, 1)):"
    wait += " time.sleep(0.1); dist.barrier()"
    copy = each_epoch(RESUMABLE, wait, tmp_path)
    python = tmp_path / "python"
    python.write_text(TORCHRUN)
    python.chmod(0o755)
    env = {"NODE0": ADDRESSES[0], "NODES": "1:2", "GPUS": "1", "RESTARTS": "3"}
    env |= {"PYTHON": str(python), "PYTHONPATH": python_path(copy)}

    def start(index):
        words = ("run/torchrun_node.sh", copy, *flags, "--run_dir", folder)
        return Job(*nodes.enter(index), *words, env=env, cwd=ROOT)

    zero, one = start(0), start(1)
    wait_for_epoch(folder, 1, zero)
    for pid in nodes.pids(1):
        os.kill(pid, signal.SIGKILL)
    one.wait()
    wait_for_epoch(folder, 2, zero)
    both_end(zero, start(1))
    assert nodes.pids(0) + nodes.pids(1) == []
    log = (folder / "log.txt").read_text()
    assert re.findall(r"(\d) of 3 epochs are done", log) == ["1", "2"]
    assert epochs(log)[-1] == epochs(alone.stdout)[-1]
    assert_same_parameters(folder / "epoch-000003.pt", undisturbed / "epoch-000003.pt")
