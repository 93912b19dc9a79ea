"""The point-to-point lessons: who waits, what is in the buffers, the deadlock, the ring."""

import re
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from conftest import Lesson, free_port, run
from forked import in_ranks, join


@pytest.mark.parametrize("processes", [2, 3])
def test_blocking_shows_buffers_and_waiting(processes):
    """A late sender makes the receiver wait; a late receiver makes the sender wait."""
    out = run("blocking_p2p", "-g", processes).stdout
    late_sender, late_receiver = re.split("^rank [01] starts a second late:$", out, flags=re.M)[1:]
    numbers = "[0.0, 1.0, 2.0, 3.0]"
    in_send = []
    in_recv = []
    for text in (late_sender, late_receiver):
        for rank in range(processes):
            [line] = re.findall(rf"^rank {rank}: (.*)$", text, re.M)
            lists = numbers if rank == 0 else f"[0.0, 0.0, 0.0, 0.0] -> {numbers}"
            assert line.startswith(f"{lists}, ")
            calls = re.findall(r"\d s in (\w+)", line)
            expected = ["recv", "send"]
            if rank == 0:
                expected = ["send"]
            if rank == processes - 1:
                expected = ["recv"]
            assert calls == expected
        in_send.append(float(re.search(r"^rank 0: .* ([\d.]+) s in send$", text, re.M)[1]))
        in_recv.append(float(re.search(r"^rank 1: .* ([\d.]+) s in recv", text, re.M)[1]))
    assert in_recv[0] > max(0.5, in_send[0])
    assert in_send[1] > max(0.5, in_recv[1])


@pytest.mark.parametrize("processes", [2, 3])
def test_deadlock_ends_and_is_cured(processes):
    """All ranks hang, say why, and receive their messages in another order or by other calls."""
    out = run("blocking_p2p", "-g", processes, "--deadlock").stdout
    right = [(rank + 1) % processes for rank in range(processes)]
    hung = re.findall(
        r"rank (\d): DEADLOCK: rank (\d) did not receive, because it was in send", out
    )
    assert [int(other) for _, other in hung] == right
    out += run("nonblocking_p2p", "-g", processes, "--deadlock").stdout
    for order in ("even ranks send first", "isend and irecv", "batch_isend_irecv"):
        received = re.findall(rf"rank (\d): {order}: received (\d)", out)
        assert [int(sender) for _, sender in received] == [
            (rank - 1) % processes for rank in range(processes)
        ]


@pytest.mark.parametrize("processes", [2, 3])
def test_nonblocking_computes_while_the_message_travels(processes):
    """Rank 1 waits in recv; with isend and irecv it computes instead. All messages arrive."""
    out = run("nonblocking_p2p", "-g", processes).stdout
    pattern = (
        r"^{}, rank (\d): \[-1.0, -1.0\] -> \[(\d).0, \2.0\],"
        r" waited ([\d.]+) s, ([\d.]+) s in all$"
    )
    waited = {}
    for name in ("blocking", "nonblocking"):
        rows = re.findall(pattern.format(name), out, re.M)
        assert [int(row[1]) for row in rows] == [
            (rank - 1) % processes for rank in range(processes)
        ]
        waited[name] = float(rows[1][2])
    assert waited["blocking"] > waited["nonblocking"]
    assert len(re.findall(r"^ring, rank .*all_reduce agrees: True$", out, re.M)) == processes


SHAPES = [(1,), (3,), (7,), (1000,), (1001,), (0,), (), (3, 5)]
DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]


def ring(rank, world_size, port, results):
    """Compare the lesson's ring with sums that one process makes, for tensors of all kinds."""
    from nonblocking_p2p import ring_all_reduce

    join(rank, world_size, port)
    for shape in SHAPES:
        for dtype in [*DTYPES, torch.bool]:
            generator = torch.Generator().manual_seed(0)
            # Small whole numbers, of which every dtype has the exact sum.
            given = [torch.randint(9, shape, generator=generator) for _ in range(world_size)]
            given = [numbers.to(dtype) for numbers in given]
            expected = reduce(torch.add, given)
            ring_all_reduce(given[rank])
            results[rank, shape, dtype] = given[rank].equal(expected)
    with pytest.raises(
        RuntimeError, match="view size"
    ):  # it has gaps, so the ring would fill a copy
        ring_all_reduce(torch.zeros(4, 4)[:, :2])
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_ring_adds_up_any_tensor(world_size):
    """Sizes that the ranks do and do not divide, fewer numbers than ranks, any shape and dtype."""
    results = in_ranks(ring, world_size)
    assert len(results) == world_size * len(SHAPES) * (len(DTYPES) + 1)
    assert [key for key, right in results.items() if not right] == []


@pytest.mark.parametrize("lesson", ["blocking_p2p", "nonblocking_p2p"])
def test_ranks_started_by_hand(lesson):
    """RANK and the rest in the environment: each process is one rank and spawns nothing."""
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meet |= {"LOCAL_RANK": "0"}
    other = Lesson(lesson, env=meet | {"RANK": "1"})
    out = run(lesson, env=meet | {"RANK": "0"}).stdout
    assert other.wait().returncode == 0
    nodes_and_ranks = re.findall(r"^(\d) +(\d) +0 +cpu", out, re.M)
    assert nodes_and_ranks == [("0", "0"), ("1", "1")]
    assert re.search(r"rank 1: .*-> \[0.0", out)


@pytest.mark.parametrize("lesson", ["blocking_p2p", "nonblocking_p2p"])
def test_two_nodes(lesson):
    """-n 2 -g 1 -nr 0 and -nr 1, here on two addresses of one machine."""
    flags = ("-n", 2, "-g", 1, "-ip", "127.0.0.2", "--port", free_port())
    other = Lesson(lesson, *flags, "-nr", 1)
    out = run(lesson, *flags, "-nr", 0).stdout
    assert other.wait().returncode == 0
    assert re.search(r"^0 +0 +0 .*\n1 +1 +0 ", out, re.M)
    assert re.search(r"rank 1: .*-> \[0.0", out)
