"""The ways to meet: -ip and --port, --init_method env://, tcp:// and file://, and a launcher's environment."""

import re
import socket

import pytest
from conftest import SHORT, Lesson, epochs, free_port, one_process, run, talks
from test_errors import one_line

TRAINING = ["manual_data_parallel", "distributed_data_parallel"]


def both_nodes(lesson, *flags, env=None):
    """Run a lesson as two nodes with one rank each; return node 0's output."""
    flags = (*(() if talks(lesson) else SHORT), "-n", 2, "-g", 1, *flags)
    one = Lesson(lesson, *flags, "-nr", 1, env=env)
    done = run(lesson, *flags, "-nr", 0, env=env)
    assert one.wait().returncode == 0
    return done.stdout


@pytest.mark.parametrize("lesson", ["blocking_p2p", "nonblocking_p2p", *TRAINING])
def test_file(lesson, tmp_path):
    """Two nodes meet in a file that both see, without an address."""
    out = both_nodes(lesson, "--init_method", f"file://{tmp_path}/meet")
    assert out.startswith("node  rank")
    if lesson in TRAINING:
        assert epochs(out) == one_process(*SHORT)


def test_file_with_a_group_made_later(tmp_path):
    """blocking_p2p --deadlock makes a second group, which meets in the same file."""
    run("blocking_p2p", "--deadlock", "--init_method", f"file://{tmp_path}/meet")


@pytest.mark.parametrize("lesson", ["distributed_data_parallel", "distributed_data_parallel2"])
@pytest.mark.parametrize("how", ["tcp", "env"])
def test_tcp_and_env(lesson, how):
    """The address comes from a URL or from the environment; nothing else changes."""
    port = free_port()
    url, env = f"tcp://127.0.0.2:{port}", None
    if how == "env":
        url, env = "env://", {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": str(port)}
    assert epochs(both_nodes(lesson, "--init_method", url, env=env)) == one_process(*SHORT)


def test_started_by_hand():
    """With RANK and the others in the environment a process is one rank and spawns nothing; env:// says so aloud."""
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    one = Lesson("blocking_p2p", "--init_method", "env://", env=env | {"RANK": "1"})
    zero = run("blocking_p2p", "--init_method", "env://", env=env | {"RANK": "0"})
    assert one.wait().returncode == 0
    assert "rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0]" in zero.stdout


@pytest.mark.parametrize("lesson", ["blocking_p2p", "distributed_data_parallel_torchrun"])
def test_started_by_hand_and_alone(lesson):
    """Rank 1 meets nobody: one line, though it has no starter that would say it."""
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    own = () if talks(lesson) else SHORT
    done = run(lesson, *own, "--timeout", 3, env=env, status=1)
    line = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(line) == 1 and "start node 0, check -ip, --port" in line[0], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("lesson", ["distributed_data_parallel", "blocking_p2p"])
def test_two_terminals_of_one_machine(lesson):
    """127.0.0.1 is an address: two nodes with two ranks each, typed side by side."""
    flags = (*(() if talks(lesson) else SHORT), "-n", 2, "-g", 2, "-ip", "127.0.0.1", "--port", free_port())
    one = Lesson(lesson, *flags, "-nr", 1)
    done = run(lesson, *flags, "-nr", 0)
    assert one.wait().returncode == 0
    assert re.findall(r"^(\d) +(\d) +(\d) +cpu", done.stdout, re.M) == [
        tuple(row) for row in ("000", "011", "120", "131")
    ]
    if lesson in TRAINING:
        assert epochs(done.stdout) == one_process(*SHORT)


def test_ipv6():
    """An address with colons gets its brackets."""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    flags = (*SHORT, "-n", 2, "-g", 1, "-ip", "::1", "--port", free_port())
    one = Lesson("distributed_data_parallel", *flags, "-nr", 1)
    done = run("distributed_data_parallel", *flags, "-nr", 0)
    assert one.wait().returncode == 0
    assert epochs(done.stdout) == one_process(*SHORT)


def test_the_same_index_on_two_nodes():
    """Two nodes say -nr 1: all three hear that it is there twice."""
    flags = ("-n", 3, "-g", 1, "-ip", "127.0.0.2", "--port", free_port(), "--timeout", 15)
    nodes = [Lesson("nonblocking_p2p", *flags, "-nr", index) for index in (0, 1, 1)]
    done = [node.wait() for node in nodes]
    assert [node.returncode for node in done] == [1, 1, 1]
    for node in done:
        one_line(node, "node 1 is there twice: give each node its own -nr")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("udp://10.0.0.1:8888", ("tcp://", "file:///")),
        ("tcp://10.0.0.1", ("tcp://<ip of node 0>:8888",)),
        ("file://meet", ("file:///",)),
        ("file:///no/such/folder/meet", ("in a folder that is there",)),
        ("file:///tmp", ("name a file",)),
        ("env://", ("export MASTER_ADDR",)),
    ],
)
def test_a_wrong_url(url, words, main):
    """Status 2 and one line, at once."""
    one_line(main("blocking_p2p", "--init_method", url), *words)


def test_detectron2_does_not_meet_in_a_file(main):
    """Its launch warns of it on several nodes; the lesson says what to use."""
    one_line(main("distributed_data_parallel2", "--init_method", "file:///tmp/meet"), "tcp://")


def test_a_foreign_server_with_detectron2():
    """A node that reaches another program on the port ends in time."""
    with socket.create_server(("0.0.0.0", 0)) as server:
        flags = (*SHORT, "-n", 2, "-g", 1, "-r", 1, "-ip", "127.0.0.2", "--port", server.getsockname()[1])
        done = run("distributed_data_parallel2", *flags, "--timeout", 5, status=1)
        one_line(done, "could not reach node 0", "start it, check -ip, --port")
