"""Faults between two nodes.

Some are survived. All others end the run in bounded time, with a last line that says what was seen.
The nodes are network namespaces. README counts the tests of this file.
"""

import os
import re
import signal
import sys
import time

import pytest
import torch
from conftest import (
    DIGITS,
    LONG,
    ROOT,
    Job,
    Lesson,
    each_epoch,
    epochs,
    one_process,
    python_path,
    run,
    train,
    wait_for_epoch,
)
from nodes import ADDRESSES
from test_errors import COME, told, wait_for_line

DDP = "distributed_data_parallel"
RESUMABLE = "distributed_data_parallel_resumable"
NODE0 = ("-ip", ADDRESSES[0])
SHORT = (*DIGITS, "--batch_size", 120)


def on_both(nodes, lesson, *flags, ranks=1, cold=False):
    """Start a lesson on both nodes."""
    flags = (*flags, "-n", 2, "-g", ranks, *NODE0)
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


def test_a_wrong_address(nodes):
    """No machine of this network has the address, also in a lesson that only talks."""
    for lesson, own in ((DDP, SHORT), ("blocking_p2p", ())):
        flags = (*own, "-n", 2, "-g", 1, "-nr", 1, "-ip", "10.77.0.9", "--timeout", 5)
        [done] = ends(nodes, Lesson(lesson, *flags, node=(nodes, 1)))
        told(done, COME.format(2, "10.77.0.9", 8888))


def test_an_address_without_a_route_or_a_name(nodes):
    """The node has no route to the address, or the name has no address."""
    for address in ("192.0.2.1", "nosuchnode"):
        flags = (*SHORT, "-n", 2, "-g", 1, "-nr", 1, "-ip", address, "--timeout", 5)
        [done] = ends(nodes, Lesson(DDP, *flags, node=(nodes, 1)))
        told(done, COME.format(2, address, 8888))


def both_end(zero, one):
    """Wait for both nodes, which must end without an error. Returns what node 0 has printed."""
    done = [zero.wait(), one.wait()]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    return done[0].stdout


def test_the_second_node_never_starts(nodes):
    """Node 0 waits --timeout seconds, and says what to start."""
    flags = (*SHORT, "-n", 2, "-g", 2, "-nr", 0, *NODE0, "--timeout", 5)
    [done] = ends(nodes, Lesson(DDP, *flags, node=(nodes, 0)))
    told(done, COME.format(4, ADDRESSES[0], 8888))


def test_the_second_node_has_other_flags(nodes):
    """Both nodes name the flag, before the first step."""
    flags = (*SHORT, "-n", 2, "-g", 1, *NODE0)
    zero = Lesson(DDP, *flags, "-nr", 0, "--lr", 0.001, node=(nodes, 0))
    one = Lesson(DDP, *flags, "-nr", 1, "--lr", 0.002, node=(nodes, 1))
    for done in ends(nodes, zero, one):
        told(done, "ValueError: the nodes differ in --lr: 0.001, 0.002")
        assert "epoch" not in done.stdout


def test_the_link_is_cut_for_good(nodes):
    """When the link is cut during training, both nodes end after --timeout."""
    zero, one = on_both(nodes, DDP, *LONG, "--timeout", 10)
    wait_for_line(zero, "epoch 3/")
    nodes.link("down")
    for done in ends(nodes, zero, one):
        told(done, "RuntimeError: ")
        assert re.search("Timed out waiting|by peer", done.stderr)


def test_the_link_is_gone_for_8_seconds(nodes, tmp_path):
    """The training continues when the link is back, and ends with the same numbers."""
    flags = (*SHORT, "--epochs", 5)
    wait = f"while epoch == 2 and not Path('{tmp_path}/down').exists(): time.sleep(0.1)"
    copy = each_epoch(DDP, wait, tmp_path)
    zero, one = on_both(nodes, copy, *flags)
    wait_for_line(zero, "epoch 2/")
    nodes.link("down")
    (tmp_path / "down").touch()
    time.sleep(8)
    nodes.link("up")
    assert epochs(both_end(zero, one))[-1] == one_process(*flags)[-1]


def test_a_slow_link(nodes):
    """With 100 Mbit/s between the nodes, the numbers are the same."""
    nodes.bandwidth("100mbit")
    flags = (*SHORT, "--model", "cnn", "--epochs", 2)
    zero, one = on_both(nodes, DDP, *flags)
    assert epochs(both_end(zero, one)) == one_process(*flags)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_is_killed(victim, nodes):
    """Its own node names the rank and the signal. The other node has lost its connection."""
    zero, one = on_both(nodes, DDP, *LONG, ranks=2)
    pids = zero.ranks(4)
    wait_for_line(zero, "epoch 1/")
    os.kill(pids[victim], signal.SIGKILL)
    done = ends(nodes, zero, one)
    node, local_rank = divmod(victim, 2)
    # A rank on the same node may find its connection closed before the kill is noticed.
    killed = f"process {local_rank} terminated with signal SIGKILL"
    assert re.search(f"{killed}|by peer", done[node].stderr.strip().splitlines()[-1])
    told(done[1 - node], "by peer")


def test_a_whole_node_is_lost(nodes):
    """All processes of node 1 are killed at once, as by a power failure. Node 0 ends."""
    zero, one = on_both(nodes, DDP, *LONG)
    wait_for_line(zero, "epoch 1/")
    for pid in nodes.pids(1):
        os.kill(pid, signal.SIGKILL)
    one.wait()
    [done] = ends(nodes, zero)
    told(done, "by peer")


def test_ctrl_c_on_one_node(nodes):
    """The other node reports that a rank has ended, and where to look."""
    zero, one = on_both(nodes, DDP, *LONG, cold=True)
    wait_for_line(zero, "epoch 1/")
    os.killpg(one.process.pid, signal.SIGINT)
    assert one.wait().returncode == 130
    [done] = ends(nodes, zero)
    told(done, "by peer")


def torchrun_node(nodes, index, lesson, *flags, **env):
    """Start a lesson's ranks of one node with run/torchrun_node.sh."""
    env = {"NODE0": ADDRESSES[0], "GPUS": "1", "PYTHON": sys.executable} | env
    env["PYTHONPATH"] = python_path(lesson)
    return Job(*nodes.enter(index), "run/torchrun_node.sh", lesson, *flags, env=env, cwd=ROOT)


def test_a_killed_rank_under_torchrun(nodes, tmp_path):
    """torchrun restarts the ranks of both nodes. They resume and end with the same parameters."""
    flags = (*SHORT, "--epochs", 5, "--double")
    run(DDP, *flags, "-g", 2, "-s", tmp_path / "undisturbed.pt")
    folder = tmp_path / "run"
    wait = "time.sleep(999 if epoch == 3 and done == 0 else 0)"
    copy = each_epoch(RESUMABLE, wait, tmp_path)
    flags = (*flags, "--run_dir", folder)
    jobs = [torchrun_node(nodes, index, copy, *flags, RESTARTS="3") for index in (0, 1)]
    wait_for_epoch(folder, 3, jobs[0])
    victim = ranks_of(nodes, 1)[0]
    os.kill(victim, signal.SIGKILL)
    both_end(*jobs)
    assert re.findall(r"(\d) of 5 epochs are done", (folder / "log.txt").read_text()) == ["3"]
    assert largest_difference(folder / "epoch-0005.pt", tmp_path / "undisturbed.pt") < 1e-9
    assert nodes.pids(0) + nodes.pids(1) == []


def largest_difference(*paths):
    """Return the largest difference between the parameters of two checkpoints."""
    one, other = [torch.load(path, weights_only=True)["model"] for path in paths]
    return max((other[name] - parameter).abs().max().item() for name, parameter in one.items())


def ranks_of(nodes, index):
    """Return the processes of a node that torchrun has started, which have RANK."""
    found = []
    for pid in nodes.pids(index):
        with open(f"/proc/{pid}/environ", "rb") as file:
            if b"\0RANK=" in file.read():
                found.append(pid)
    return found


def test_a_node_lost_and_back(nodes, tmp_path):
    """With NODES=1:2, node 0 continues alone when node 1 is lost, and with node 1 when it is back.

    The run ends with the parameters of a single process. After the third epoch both ranks wait for
    the loss. After the sixth epoch rank 0 waits for node 1.
    """
    flags = (*SHORT, "--double", "--epochs", 9)
    undisturbed = tmp_path / "undisturbed"
    alone = train(RESUMABLE, *flags, "--run_dir", undisturbed, processes=1)
    wait = "while epoch == 3 * (3 - dist.get_world_size()):"
    wait += " time.sleep(0.1) if dist.get_world_size() == 1 else dist.barrier()"
    copy = each_epoch(RESUMABLE, wait, tmp_path)
    folder = tmp_path / "run"
    flags = (*flags, "--run_dir", folder)
    elastic = {"NODES": "1:2", "RESTARTS": "3"}
    zero = torchrun_node(nodes, 0, copy, *flags, **elastic)
    one = torchrun_node(nodes, 1, copy, *flags, **elastic)
    wait_for_epoch(folder, 3, zero)
    for pid in nodes.pids(1):
        os.kill(pid, signal.SIGKILL)
    one.wait()
    wait_for_epoch(folder, 6, zero)
    back = torchrun_node(nodes, 1, copy, *flags, **elastic)
    both_end(zero, back)
    assert nodes.pids(0) + nodes.pids(1) == []
    log = (folder / "log.txt").read_text()
    assert re.findall(r"(\d) of 9 epochs are done", log) == ["3", "6"]
    assert epochs(log)[-1] == epochs(alone.stdout)[-1]
    assert largest_difference(folder / "epoch-0009.pt", undisturbed / "epoch-0009.pt") < 1e-9
