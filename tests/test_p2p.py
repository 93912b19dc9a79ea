"""The ring of nonblocking_p2p.py, and the cure of the deadlock with three ranks.

The last rank and the first are neighbours in the ring, and both are even. What the lessons print is
compared by test_readme.py, and their calls by test_pictures.py.
"""

import pytest
import torch
import torch.distributed as dist
from conftest import run

from watching.ranks import call


def test_cures_of_a_deadlock():
    """All messages arrive, also with three ranks."""
    out = run("nonblocking_p2p", "-g", 3, "--deadlock").stdout
    for rank in range(3):
        for cure in ("nonblocking", "batched"):
            assert f"rank {rank}: {cure}: received {(rank - 1) % 3}\n" in out


def ring(rank):
    """Compare the lesson's ring with a sum that one process makes."""
    from nonblocking_p2p import ring_all_reduce

    for shape in [(1,), (7,), (1000,), (0,), (), (3, 5)]:
        generator = torch.Generator().manual_seed(0)
        given = torch.randint(9, (dist.get_world_size(), *shape), generator=generator)
        tensor = given[rank].clone()
        ring_all_reduce(tensor)
        assert tensor.equal(given.sum(dim=0)), shape
    with pytest.raises(RuntimeError, match="view size"):
        ring_all_reduce(torch.zeros(4, 4)[:, :2])  # it has gaps, so the ring would fill a copy


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_ring_adds_up_any_tensor(world_size):
    """Sizes that the ranks do and do not divide, fewer numbers than ranks, any shape."""
    call(ring, world_size)
