"""The ring of nonblocking_p2p.py, and the cure of the deadlock with three ranks.

The last rank and the first are neighbours in the ring, and both are even. What the lessons print is
compared by test_readme.py.
"""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from launch import run
from lessons import lesson_path

from watch_ranks.ranks import call


def test_cures_of_a_deadlock():
    """All messages arrive, also with three ranks."""
    out = run("nonblocking_p2p", "-g", 3, "--deadlock").stdout
    for rank in range(3):
        for cure in ("nonblocking", "batched"):
            assert f"rank {rank}: {cure}: received {(rank - 1) % 3}\n" in out


def test_a_line_is_written_at_once():
    """Otherwise lines of two ranks mix where Python keeps no output back, as in many containers."""
    ours, theirs = os.pipe2(os.O_DIRECT)  # what is written at once is read at once
    command = [sys.executable, lesson_path("blocking_p2p"), "-g", "2"]
    subprocess.run(command, stdout=theirs, env=os.environ | {"PYTHONUNBUFFERED": "1"}, check=True)
    os.close(theirs)
    parts = list(iter(lambda: os.read(ours, 4096), b""))
    os.close(ours)
    assert len(parts) > 4 and all(part.count(b"\n") == 1 and part[-1:] == b"\n" for part in parts)


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
