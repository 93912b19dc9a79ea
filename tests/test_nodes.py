"""The lessons on two nodes with addresses of their own: network namespaces joined by a cable."""

import pytest
from conftest import Lesson, epochs, run
from nodes import ADDRESSES

SHORT = ("--dataset", "digits", "--device", "cpu", "--batch_size", 120, "--epochs", 2)


@pytest.mark.parametrize("lesson", ["distributed_data_parallel"])
def test_two_nodes(lesson, nodes):
    """Two nodes with two ranks each print what one process prints."""
    flags = (*SHORT, "-n", 2, "-g", 2, "-ip", ADDRESSES[0])
    one = Lesson(lesson, *flags, "-nr", 1, prefix=nodes.enter(1))
    done = run(lesson, *flags, "-nr", 0, prefix=nodes.enter(0))
    assert one.wait().returncode == 0
    assert [row.split()[-1] for row in done.stdout.splitlines()[1:5]] == ["node0", "node0", "node1", "node1"]
    assert epochs(done.stdout) == epochs(run("single_gpu", *SHORT).stdout)
