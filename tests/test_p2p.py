"""The point-to-point lessons: who waits, what is in the buffers, the deadlock, the ring.

With three ranks, the last rank and the first are neighbours in the ring, and both are even.
test_rendezvous.py and test_nodes.py start these lessons on two nodes and by hand.
"""

import re
from functools import reduce

import pytest
import torch
from conftest import run
from forked import in_group

RANKS = (0, 1, 2)
SENDERS = ["2", "0", "1"]  # from which rank each rank receives


def test_blocking_shows_buffers_and_waiting():
    """A late sender makes the receiver wait; a late receiver makes the sender wait."""
    out = run("blocking_p2p", "-g", 3).stdout
    parts = re.split("^rank [01] starts a second late:$", out, flags=re.M)[1:]
    in_send = []
    in_recv = []
    for text in parts:
        numbers = re.escape("[0.0, 1.0, 2.0, 3.0]")
        empty = re.escape("[0.0, 0.0, 0.0, 0.0]")
        [sent] = re.findall(rf"^rank 0: {numbers}, ([\d.]+) s in send$", text, re.M)
        start = rf"{empty} -> {numbers}, ([\d.]+) s in recv"
        [received] = re.findall(rf"^rank 1: {start}, [\d.]+ s in send$", text, re.M)
        assert len(re.findall(rf"^rank 2: {start}$", text, re.M)) == 1
        in_send.append(float(sent))
        in_recv.append(float(received))
    assert len(parts) == 2
    assert in_recv[0] > max(0.5, in_send[0])
    assert in_send[1] > max(0.5, in_recv[1])


def test_deadlock_ends_and_is_cured():
    """All ranks hang, say why, and receive their messages in another order or by other calls."""
    out = run("blocking_p2p", "-g", 3, "--deadlock").stdout
    because = "did not receive, because it was in send, too"
    assert re.findall(rf"rank \d: DEADLOCK: rank (\d) {because}", out) == ["1", "2", "0"]
    out += run("nonblocking_p2p", "-g", 3, "--deadlock").stdout
    for order in ("even ranks send first", "isend and irecv", "batch_isend_irecv"):
        assert re.findall(rf"rank \d: {order}: received (\d)", out) == SENDERS


def test_nonblocking_computes_while_the_message_travels():
    """Rank 1 waits in recv; with isend and irecv it computes instead. All messages arrive."""
    out = run("nonblocking_p2p", "-g", 3).stdout
    waited = {}
    for name in ("blocking", "nonblocking"):
        buffer = r"\[-1.0, -1.0\] -> \[(\d).0, \1.0\]"
        times = r"waited ([\d.]+) s, [\d.]+ s in all"
        rows = re.findall(rf"^{name}, rank \d: {buffer}, {times}$", out, re.M)
        assert [sender for sender, _ in rows] == SENDERS
        waited[name] = float(rows[1][1])
    assert waited["blocking"] > waited["nonblocking"]
    assert len(re.findall(r"^ring, rank .*all_reduce agrees: True$", out, re.M)) == 3


SHAPES = [(1,), (3,), (7,), (1000,), (1001,), (0,), (), (3, 5)]
DTYPES = [torch.float64, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool]


def ring(rank, world_size):
    """Compare the lesson's ring with sums that one process makes, for tensors of all kinds."""
    from nonblocking_p2p import ring_all_reduce

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


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_the_ring_adds_up_any_tensor(world_size):
    """Sizes that the ranks do and do not divide, fewer numbers than ranks, any shape and dtype."""
    in_group(ring, world_size, world_size)
