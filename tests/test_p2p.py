"""The point-to-point lessons: who waits, what is in the buffers, the deadlock, the ring."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import Lesson, free_port, run


@pytest.mark.parametrize("processes", [2, 3])
def test_blocking_shows_buffers_and_waiting(processes):
    """The message goes from rank to rank; a late sender makes the receiver wait, a late receiver the sender."""
    out = run("blocking_p2p", "-g", processes).stdout
    found = re.findall(r"rank (\d): \[(.*?)\] -> \[0.0, 1.0, 2.0, 3.0\], ([\d.]+) s in recv, ([\d.]+) s in send", out)
    assert [int(rank) for rank, *_ in found] == [*range(processes)] * 2
    assert [before for _, before, *_ in found][1:processes] == ["0.0, 0.0, 0.0, 0.0"] * (processes - 1)
    late_sender, late_receiver = found[:processes], found[processes:]
    assert float(late_sender[1][2]) > max(0.5, float(late_sender[0][3]))
    assert float(late_receiver[0][3]) > max(0.5, float(late_receiver[1][2]))


@pytest.mark.parametrize("processes", [2, 3])
def test_deadlock_ends_and_is_cured(processes):
    """All ranks hang, say why, and get their messages in each of the three other orders."""
    out = run("blocking_p2p", "-g", processes, "--deadlock").stdout
    assert len(re.findall(r"rank \d: DEADLOCK: rank \d receives only after its own send", out)) == processes
    for order in ("even ranks send first", "isend and irecv", "batch_isend_irecv"):
        received = re.findall(rf"rank (\d): {order}: received (\d)", out)
        assert [(int(a), int(b)) for a, b in received] == [(rank, (rank - 1) % processes) for rank in range(processes)]


@pytest.mark.parametrize("processes", [2, 3])
def test_nonblocking_works_while_the_message_flies(processes):
    """Odd ranks wait with send and recv; with isend and irecv none does, though each does its work."""
    out = run("nonblocking_p2p", "-g", processes).stdout
    pattern = (
        r"{}, rank (\d): \[-1.0, -1.0\] -> \[(\d).0, .*?s, (-?[\d.]+) s of it not working, ([\d,]+) matrix products"
    )
    blocking = re.findall(pattern.format("blocking"), out)
    nonblocking = re.findall(pattern.format("nonblocking"), out)[-processes:]
    assert len(nonblocking) == processes
    for rank, received, _, products in nonblocking:
        assert int(received) == (int(rank) - 1) % processes
        assert int(products.replace(",", "")) > 0
    assert float(blocking[1][2]) > float(nonblocking[1][2])
    assert len(re.findall(r"ring, rank .*as dist.all_reduce: True", out)) == processes


def ring(rank, world_size, port, results):
    """Run the lesson's ring and dist.all_reduce on tensors of several lengths in one process."""
    from nonblocking_p2p import ring_all_reduce

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    for length in (1, 3, 7, 1000, 1001):
        mine = torch.randn(length, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        expected = mine.clone()
        dist.all_reduce(expected)
        ring_all_reduce(mine)
        results[rank * 10_000 + length] = torch.allclose(mine, expected, rtol=0, atol=1e-12)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_ring_equals_all_reduce(world_size):
    """For 2 to 5 ranks, with lengths that do and do not divide, and fewer numbers than ranks."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(ring, (world_size, free_port(), results), world_size, start_method="fork")
        assert dict(results) == {r * 10_000 + n: True for r in range(world_size) for n in (1, 3, 7, 1000, 1001)}


@pytest.mark.parametrize("lesson", ["blocking_p2p", "nonblocking_p2p"])
def test_ranks_started_by_hand(lesson):
    """RANK and the rest in the environment: each process is one rank and spawns nothing."""
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    other = Lesson(lesson, env=meet | {"RANK": "1"})
    out = run(lesson, env=meet | {"RANK": "0"}).stdout
    assert other.wait().returncode == 0
    assert re.search(r"^0 +0 +0 +cpu", out, re.M)
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
