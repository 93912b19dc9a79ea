"""The point-to-point lessons with three ranks: the cures of the deadlock, and the ring.

The last rank and the first are neighbours in the ring, and both are even. What the lessons print is
compared by test_readme.py, and their calls by test_pictures.py.
"""

from datetime import timedelta
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from conftest import run
from forked import in_group

MINUTE = timedelta(minutes=1)  # for a message, which otherwise may take half an hour


@pytest.mark.parametrize(
    ("lesson", "cures"),
    [("blocking_p2p", ["even ranks send first"]), ("nonblocking_p2p", ["nonblocking", "batched"])],
)
def test_cures_of_a_deadlock(lesson, cures):
    """All messages arrive, also with three ranks."""
    out = run(lesson, "-g", 3, "--deadlock").stdout
    for rank in range(3):
        for cure in cures:
            assert f"rank {rank}: {cure}: received {(rank - 1) % 3}\n" in out


SHAPES = [(1,), (3,), (7,), (1000,), (1001,), (0,), (), (3, 5)]
DTYPES = [torch.float64, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool]


def ring(rank, world_size):
    """Compare the lesson's ring with sums that one process makes, for tensors of all kinds."""
    from nonblocking_p2p import ring_all_reduce

    dist.group.WORLD.set_timeout(MINUTE)
    for shape in SHAPES:
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(0)
            # Small whole numbers, of which every dtype has the exact sum.
            given = [torch.randint(9, shape, generator=generator) for _ in range(world_size)]
            given = [numbers.to(dtype) for numbers in given]
            expected = reduce(torch.add, given)
            ring_all_reduce(given[rank])
            assert given[rank].equal(expected), (shape, dtype)
    with pytest.raises(RuntimeError, match="view size"):
        ring_all_reduce(torch.zeros(4, 4)[:, :2])  # it has gaps, so the ring would fill a copy


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_ring_adds_up_any_tensor(world_size):
    """Sizes that the ranks do and do not divide, fewer numbers than ranks, any shape and dtype."""
    in_group(ring, world_size, world_size)
