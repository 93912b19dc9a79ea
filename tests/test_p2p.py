"""The point-to-point lessons: who waits, what is in the buffers, the deadlock, the ring.

With three ranks, the last rank and the first are neighbours in the ring, and both are even. Time is
a clock that advances by a second whenever it is read. The lessons' own commands are run by
test_readme.py, and by hand by test_rendezvous.py.
"""

import contextlib
from datetime import timedelta
from functools import reduce
from itertools import count
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forked import in_group

CPU = torch.device("cpu")
MINUTE = timedelta(minutes=1)  # for a message, which otherwise may take half an hour


@contextlib.contextmanager
def noted(lesson, **others):
    """Replace a lesson's clock and its printing. Yields how long it slept, and what it printed."""
    slept, lines = [], []
    time = SimpleNamespace(sleep=slept.append, perf_counter=count(0.0).__next__)
    with mock.patch.multiple(lesson, time=time, report=lines.append, **others):
        yield slept, lines


def blocking(rank):
    """Pass numbers on, in which one rank is late, and then deadlock."""
    import blocking_p2p as lesson

    dist.group.WORLD.set_timeout(MINUTE)
    numbers, empty = "[0.0, 1.0, 2.0, 3.0]", "[0.0, 0.0, 0.0, 0.0]"
    line = f"rank {rank}: {numbers}" if rank == 0 else f"rank {rank}: {empty} -> {numbers}"
    line += ", 1.0 s in recv" * (rank > 0) + ", 1.0 s in send" * (rank < 2)
    for late in (0, 1):
        with noted(lesson) as (slept, lines):
            lesson.relay(rank, CPU, late)
        assert slept == [1] * (rank == late)
        assert lines == [line]
    with noted(lesson) as (slept, lines):
        lesson.show_deadlock(rank, CPU)
    because = f"rank {(rank + 1) % 3} did not receive, because it was in send, too"
    cure = f"rank {rank}: even ranks send first: received {(rank - 1) % 3}"
    assert lines == [f"rank {rank}: DEADLOCK: {because}", cure]


def test_blocking_messages_and_a_deadlock():
    """A rank is late, and each takes the time of its own calls. All hang, and are cured."""
    in_group(blocking, 3)


def nonblocking(rank):
    """Exchange numbers in both ways, and note when a rank computes and waits."""
    import nonblocking_p2p as lesson

    dist.group.WORLD.set_timeout(MINUTE)
    events = []
    right, left = (rank + 1) % 3, (rank - 1) % 3
    start_exchange = lesson.start_exchange

    def noting(request):
        return SimpleNamespace(wait=lambda: (events.append("wait"), request.wait()))

    own = {"compute": lambda device: events.append("compute")}
    own["start_exchange"] = lambda *words: [noting(each) for each in start_exchange(*words)]
    orders = {"blocking": ["compute"], "nonblocking": ["compute", "wait", "wait"]}
    for name, order in orders.items():
        events.clear()
        with noted(lesson, **own) as (slept, lines):
            lesson.show_waiting(getattr(lesson, name), rank, CPU, right, left)
        assert slept == [0.5] * (rank == 0)
        buffer = f"[-1.0, -1.0] -> [{left}.0, {left}.0]"
        assert lines == [f"{name}, rank {rank}: {buffer}, waited 1.0 s, 3.0 s in all"]
        assert events == order
    with noted(lesson) as (slept, lines):
        lesson.show_cures(rank, CPU, right, left)
    for line, cure in zip(lines, ("isend and irecv", "batch_isend_irecv"), strict=True):
        assert line == f"rank {rank}: {cure}: received {left}"


def test_nonblocking_computes_before_it_waits():
    """All messages arrive, also if all ranks send first."""
    in_group(nonblocking, 3)


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
