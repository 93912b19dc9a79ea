"""The collectives: what every rank holds afterwards, and calls that differ."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import run
from forked import in_group

BEFORE = [[10.0, 11.0, 12.0], [20.0, 21.0, 22.0], [30.0, 31.0, 32.0]]  # on three ranks
OWN = [10.0, 21.0, 32.0]
SUMS = [60.0, 63.0, 66.0]
AFTER = {
    "broadcast": [BEFORE[0]] * 3,
    "scatter": [[10.0], [11.0], [12.0]],
    "gather": [OWN, [], []],
    "all_gather": [OWN] * 3,
    "reduce": [SUMS, [], []],
    "reduce_scatter": [[60.0], [63.0], [66.0]],
    "all_to_all": [[10.0, 20.0, 30.0], [11.0, 21.0, 31.0], [12.0, 22.0, 32.0]],
    "all_reduce": [SUMS] * 3,
}


def rows(before, *after):
    """Return the lines of the ranks: what each of them holds before, and then after."""
    lines = []
    for rank, lists in enumerate(zip(before, *after, strict=True)):
        lines.append(f"rank {rank}: {' -> '.join(map(str, lists))}")
    return lines


def test_what_is_printed():
    """The numbers are those of lists. With async_op the sum is the same.

    At the barrier, the other ranks wait longer than rank 0.
    """
    out = run("collectives", "-g", 3).stdout
    for name, after in AFTER.items():
        table = "\n".join(rows(BEFORE, after))
        assert re.search(rf"^{name}: .*\n{re.escape(table)}$", out, re.M), out
    for line in rows(BEFORE, AFTER["reduce_scatter"], [SUMS] * 3):
        assert f"\n{line}, = all_reduce: True\n" in out
    for line in rows(BEFORE, [SUMS] * 3):
        assert f"\n{line} by async_op\n" in out
    waited = re.findall(r"^rank \d: ([\d.]+) s at a barrier", out, re.M)
    first, second, third = map(float, waited)
    assert second > first and third > first


def ring(rank):
    """Count the bytes that the ring of nonblocking_p2p.py sends."""
    import nonblocking_p2p

    sent = []

    def batch(operations):
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return dist.batch_isend_irecv(operations)

    counting = SimpleNamespace(**vars(dist) | {"batch_isend_irecv": batch})
    with mock.patch.object(nonblocking_p2p, "dist", counting):
        nonblocking_p2p.ring_all_reduce(torch.ones(3 * 5))
    assert sent == [4 * 5] * 2 * (3 - 1)


def test_what_a_ring_sends():
    """2(n-1) chunks, as the docstring says of an all_reduce."""
    in_group(ring, 3)


IMPORT = "import torch.distributed as dist\n"
REDUCE, BROADCAST = "    dist.all_reduce(mine)\n", "    dist.broadcast(mine, src=0)\n"
ORDERED = """    ones = torch.ones_like(mine)
    for tensor in (mine, ones) if rank == 0 else (ones, mine):
        dist.all_reduce(tensor)
"""


@pytest.fixture
def broken(change):
    """Return a function that runs the lesson with a line replaced.

    With compared=True, PyTorch compares the ranks' calls.
    """

    def ran(old, new, status, compared=False):
        if not compared:
            return run(change("collectives", (old, new)), "--timeout", 10, status=status)
        # PyTorch reads the variable when it is imported, which was before the run.
        reads = (IMPORT, f"{IMPORT}dist.set_debug_level_from_env()\n")
        env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
        copy = change("collectives", (old, new), reads)
        return run(copy, "--timeout", 200, status=status, env=env)

    return ran


def test_a_rank_that_skips_a_collective(broken):
    """Rank 0 waits in it, rank 1 in the next one, until the timeout. PyTorch can name both."""
    skipped = f"    if rank != 1:\n    {REDUCE}"
    done = broken(REDUCE, skipped, 1)
    assert "\nall_to_all: " in done.stdout and "\nall_reduce: " not in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ") and re.search("Timed out waiting|by peer", last)
    assert "OpType=ALLREDUCE" in broken(REDUCE, skipped, 1, compared=True).stderr


def test_two_all_reduces_in_a_different_order(broken):
    """There is no error: the numbers of one rank are added to the ones of the other."""
    for compared in (False, True):
        out = broken(REDUCE, ORDERED, 0, compared).stdout
        assert "rank 0: [10.0, 11.0] -> [11.0, 12.0]\nrank 1: [20.0, 21.0] -> [21.0, 22.0]" in out


def test_a_different_size(broken):
    """A broadcast fills in what arrives, without an error. An all_reduce ends with one.

    PyTorch sees two shapes if it compares them.
    """
    fewer = "mine[:1] if rank == 0 else mine"
    broadcast = BROADCAST.replace("mine", fewer)
    out = broken(BROADCAST, broadcast, 0).stdout
    assert "rank 1: [20.0, 21.0] -> [10.0, 21.0]\nscatter: " in out
    done = broken(BROADCAST, broadcast, 1, compared=True)
    assert re.search("Tensor shapes: (1vs 2|2vs 1)", done.stderr)
    done = broken(REDUCE, REDUCE.replace("mine", fewer), 1)
    assert "\nall_to_all: " in done.stdout and "\nall_reduce: " not in done.stdout
    assert re.search("Timed out waiting|by peer|signal SIGABRT", done.stderr)
