"""The lessons on two nodes with addresses of their own: network namespaces joined by a cable."""

import pytest
from conftest import SHORT, Lesson, epochs, one_process, run
from nodes import ADDRESSES


@pytest.mark.parametrize(
    ("lesson", "gpus"),
    [("manual_data_parallel", 1), ("distributed_data_parallel", 2), ("distributed_data_parallel2", 1)],
)
def test_training_on_two_nodes(lesson, gpus, nodes, tmp_path):
    """Two nodes with one or two ranks each print what one process prints; that only node 0 saves is no difference."""
    flags = (*SHORT, "-n", 2, "-g", gpus, "-ip", ADDRESSES[0])
    one = Lesson(lesson, *flags, "-nr", 1, prefix=nodes.enter(1))
    done = run(lesson, *flags, "-nr", 0, "-s", tmp_path / "c.pt", prefix=nodes.enter(0))
    assert one.wait().returncode == 0
    assert (tmp_path / "c.pt").exists()
    hosts = [row.split()[-1] for row in done.stdout.splitlines()[1 : 2 * gpus + 1]]
    assert hosts == ["node0"] * gpus + ["node1"] * gpus
    assert epochs(done.stdout) == one_process(*SHORT)


def test_messages_between_two_nodes(nodes):
    """blocking_p2p and nonblocking_p2p: what rank 0 sends arrives on the other node."""
    for lesson, line in (
        ("blocking_p2p", "rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0], 1.0 s in recv"),
        ("nonblocking_p2p", "[0.0, 2.0, 4.0, 6.0, 8.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], as dist.all_reduce: True"),
    ):
        flags = ("--device", "cpu", "-n", 2, "-g", 1, "-ip", ADDRESSES[0])
        one = Lesson(lesson, *flags, "-nr", 1, prefix=nodes.enter(1))
        done = run(lesson, *flags, "-nr", 0, prefix=nodes.enter(0))
        assert one.wait().returncode == 0
        assert line in done.stdout
