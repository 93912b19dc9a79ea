"""The lessons on two nodes with addresses of their own: network namespaces joined by a cable."""

import pytest
from conftest import Lesson, epochs, run
from nodes import ADDRESSES

SHORT = ("--dataset", "digits", "--device", "cpu", "--batch_size", 120, "--epochs", 2)


@pytest.mark.parametrize(
    "lesson", ["manual_data_parallel", "distributed_data_parallel", "distributed_data_parallel2", "pipeline_parallel"]
)
def test_training_on_two_nodes(lesson, nodes):
    """Two nodes with two ranks each print what one process prints."""
    flags = (*SHORT, "-n", 2, "-g", 2, "-ip", ADDRESSES[0])
    one = Lesson(lesson, *flags, "-nr", 1, prefix=nodes.enter(1))
    done = run(lesson, *flags, "-nr", 0, prefix=nodes.enter(0))
    assert one.wait().returncode == 0
    assert [row.split()[-1] for row in done.stdout.splitlines()[1:5]] == ["node0", "node0", "node1", "node1"]
    assert epochs(done.stdout) == epochs(run("single_gpu", *SHORT).stdout)


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
