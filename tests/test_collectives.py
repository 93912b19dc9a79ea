"""The collectives: what every rank holds afterwards, and calls that differ."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import run
from forked import in_group


def tables(out):
    """Return the tables by name: for each rank the lists that it has held, and what is said."""
    found = {}
    for name, rows in re.findall(r"^(\w+)[:,] .*\n((?:rank \d+: .*\n)+)", out, re.M):
        shown = {}
        for rank, line in re.findall(r"^rank (\d+): (\[.*(?:\]|True|False))$", rows, re.M):
            lists = []
            for part in re.findall(r"\[(.*?)\]", line):
                lists.append([float(number) for number in part.split(",") if number])
            shown[int(rank)] = (lists, line.rpartition("]")[2])
        assert list(shown) == list(range(len(shown)))
        if name in found:
            name = "both"  # the last table begins with reduce_scatter, too
        found[name] = shown
    return found


def expected(n):
    """Return what the tables must show for n ranks, from lists."""
    before = [[10.0 * (rank + 1) + chunk for chunk in range(n)] for rank in range(n)]
    columns = [list(column) for column in zip(*before, strict=True)]
    sums = [sum(column) for column in columns]
    own = [before[rank][rank] for rank in range(n)]
    after = {
        "broadcast": [before[0]] * n,
        "scatter": [[number] for number in before[0]],
        "gather": [own] + [[]] * (n - 1),
        "all_gather": [own] * n,
        "reduce": [sums] + [[]] * (n - 1),
        "reduce_scatter": [[number] for number in sums],
        "all_to_all": columns,
        "all_reduce": [sums] * n,
    }
    found = {}
    for name, lists in after.items():
        found[name] = {rank: ([before[rank], lists[rank]], "") for rank in range(n)}
    found["both"] = {}
    for rank in range(n):
        found["both"][rank] = [before[rank], [sums[rank]], sums], ", = all_reduce: True"
    return found


def test_what_is_printed():
    """The numbers are those of lists. With async_op the sum is the same.

    At the barrier, the other ranks wait longer than rank 0.
    """
    out = run("collectives", "-g", 3).stdout
    assert tables(out) == expected(3)
    sums = str([60.0, 63.0, 66.0])
    found = re.findall(r"^rank (\d): \[.*\] -> (\[.*\]) by async_op$", out, re.M)
    assert found == [("0", sums), ("1", sums), ("2", sums)]
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
    assert list(tables(done.stdout)) == list(expected(2))[:7]  # all that come before
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ") and re.search("Timed out waiting|by peer", last)
    assert "OpType=ALLREDUCE" in broken(REDUCE, skipped, 1, compared=True).stderr


def test_two_all_reduces_in_a_different_order(broken):
    """There is no error: the numbers of one rank are added to the ones of the other."""
    for compared in (False, True):
        shown = tables(broken(REDUCE, ORDERED, 0, compared).stdout)["all_reduce"]
        assert [after for (_, after), _ in shown.values()] == [[11.0, 12.0], [21.0, 22.0]]


def test_a_different_size(broken):
    """A broadcast fills in what arrives, without an error. An all_reduce ends with one.

    PyTorch sees two shapes if it compares them.
    """
    fewer = "mine[:1] if rank == 0 else mine"
    broadcast = BROADCAST.replace("mine", fewer)
    out = broken(BROADCAST, broadcast, 0).stdout
    assert tables(out)["broadcast"][1][0] == [[20.0, 21.0], [10.0, 21.0]]
    done = broken(BROADCAST, broadcast, 1, compared=True)
    assert re.search("Tensor shapes: (1vs 2|2vs 1)", done.stderr)
    done = broken(REDUCE, REDUCE.replace("mine", fewer), 1)
    assert list(tables(done.stdout)) == list(expected(2))[:7]
    assert "Timed out waiting" in done.stderr or "signal SIGABRT" in done.stderr
