"""The ways in which ranks find each other: an address, a URL, a file, the environment."""

import re
import socket

import pytest
from launch import SHORT, Lesson, epochs, free_port, one_line, one_process, ranks, run
from lessons import talks

DDP = "distributed_data_parallel"


def both_nodes(lesson, *flags, ranks=1, env=None):
    """Run a lesson as two nodes with so many ranks each. Returns what both print, node 0 first."""
    own = () if talks(lesson) else SHORT
    flags = (*own, "-n", 2, "-g", ranks, *flags)
    number = "-r" if lesson == f"{DDP}2" else "-nr"  # the older name of this flag
    one = Lesson(lesson, *flags, number, 1, env=env)
    zero = run(lesson, *flags, number, 0, env=env)
    ended = one.wait()
    assert ended.returncode == 0
    return zero.stdout + ended.stdout


def places(text):
    """Return node, rank and local_rank of each row of the table of the ranks."""
    return ["".join(row) for row in re.findall(r"^(\d) +(\d) +(\d) +cpu", text, re.M)]


def test_file_tcp_and_env(tmp_path):
    """Two nodes find each other in a file that both can read, by a URL, or by the environment.

    blocking_p2p --deadlock makes a second group, which uses the same file.
    """
    out = both_nodes("blocking_p2p", "--deadlock", "--init_method", f"file://{tmp_path}/meet")
    assert re.findall(r"^rank (\d) of 2: ", out, re.M) == ["0", "1"]
    assert "rank 1: even ranks send first: received 0" in out
    url = f"tcp://127.0.0.2:{free_port()}"
    out = both_nodes(f"{DDP}2", "--init_method", url)
    assert epochs(out) == one_process(*SHORT)
    env = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(free_port())}
    out = both_nodes(DDP, "--init_method", "env://", env=env)
    assert epochs(out) == one_process(*SHORT)


def test_started_by_hand():
    """A process with RANK in its environment is one rank, on a node of its own."""
    zero, one = [job.wait() for job in ranks("blocking_p2p")]
    assert (zero.returncode, one.returncode) == (0, 0)
    assert "rank 1 of 2: " in one.stdout
    assert "rank 1 has [0.0, 1.0, 2.0, 3.0]" in one.stdout


def test_started_by_hand_with_flags():
    """RANK alone stands for -g 1 -nr: the flags say where the other rank is."""
    flags = ("-n", 2, "-ip", "127.0.0.2", "--port", free_port())
    one = Lesson("blocking_p2p", *flags, env={"RANK": "1"})
    run("blocking_p2p", *flags, env={"RANK": "0"})
    assert "rank 1 has [0.0, 1.0, 2.0, 3.0]" in one.wait().stdout


def test_started_by_hand_and_alone():
    """If rank 0 is missing, rank 1 ends, and its last line has the address."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    env |= {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
    done = run("blocking_p2p", "--timeout", 1, env=env, status=1)
    assert "trying to connect to (127.0.0.1, 1)" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("All 2 ranks must connect to env://: ")


def test_two_terminals_of_one_machine():
    """They are two nodes, with two ranks each. An IPv6 address needs no brackets."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    out = both_nodes(DDP, "-ip", "::1", "--port", free_port(), ranks=2)
    assert places(out) == ["000", "011", "120", "131"]
    assert epochs(out) == one_process(*SHORT)


def test_gloo_does_not_connect():
    """As with an interface that is not there: the last line names the variable that selects it."""
    done = run(DDP, *SHORT, "-g", 2, env={"GLOO_SOCKET_IFNAME": "nosuch0"}, status=1)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith("export GLOO_SOCKET_IFNAME=<network interface>, such as eth0.")


def test_detectron2_does_not_meet_in_a_file(main):
    """detectron2's launch warns of file:// on several nodes. The lesson names what to use."""
    one_line(main("distributed_data_parallel2", "--init_method", "file:///tmp/meet"), "tcp://")
