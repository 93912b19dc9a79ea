"""The collectives: what every rank holds afterwards, and calls that differ."""

import re

import pytest
import torch
import torch.distributed as dist
from conftest import Lesson, free_port, lesson_path, run, train
from forked import in_ranks, join


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


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_printed(n):
    """The numbers are those of lists. With async_op the sum is the same.

    At the barrier, the other ranks wait longer than rank 0.
    """
    out = train("collectives", processes=n).stdout
    assert tables(out) == expected(n)
    sums = [10.0 * sum(range(1, n + 1)) + n * chunk for chunk in range(n)]
    found = re.findall(r"^rank (\d): \[.*\] -> (\[.*\]) by async_op$", out, re.M)
    assert found == [(str(rank), str(sums)) for rank in range(n)]
    waited = re.findall(r"^rank (\d): ([\d.]+) s at a barrier", out, re.M)
    assert [rank for rank, _ in waited] == [str(rank) for rank in range(n)]
    assert all(float(seconds) > float(waited[0][1]) for _, seconds in waited[1:])


def counted(rank, world_size, port, results):
    """Count the bytes that the ring of nonblocking_p2p.py sends."""
    import nonblocking_p2p

    join(rank, world_size, port)
    sent = []
    plain = dist.batch_isend_irecv

    def batch(operations):
        sent.extend(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return plain(operations)

    nonblocking_p2p.dist.batch_isend_irecv = batch
    nonblocking_p2p.ring_all_reduce(torch.ones(world_size * 5))
    nonblocking_p2p.dist.batch_isend_irecv = plain
    results[rank] = sum(sent)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_what_a_ring_sends(world_size):
    """2(n-1) chunks, as the docstring says of an all_reduce."""
    chunk = 4 * 5
    results = in_ranks(counted, world_size)
    assert results == {rank: 2 * (world_size - 1) * chunk for rank in range(world_size)}


def test_ranks_started_by_hand():
    """RANK and the rest in the environment: each process is one rank and starts no others."""
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    meet |= {"LOCAL_RANK": "0"}
    other = Lesson("collectives", env=meet | {"RANK": "1"})
    out = run("collectives", env=meet | {"RANK": "0"}).stdout
    assert other.wait().returncode == 0
    assert tables(out) == expected(2)


def test_two_nodes():
    """-n 2 -g 1 -nr 0 and -nr 1, here on two addresses of one machine."""
    flags = ("-n", 2, "-g", 1, "-ip", "127.0.0.2", "--port", free_port())
    other = Lesson("collectives", *flags, "-nr", 1)
    out = run("collectives", *flags, "-nr", 0).stdout
    assert other.wait().returncode == 0
    assert re.search(r"^0 +0 +0 .*\n1 +1 +0 ", out, re.M)
    assert tables(out) == expected(2)


@pytest.fixture
def broken(tmp_path):
    """Return a function that runs the lesson with a line replaced.

    With compared=True, PyTorch compares the ranks' calls.
    """

    def ran(old, new, status, compared=False):
        text = lesson_path("collectives").read_text()
        start = text.index('"""', 3)
        assert text.count(old) == text[start:].count(old) == 1
        text = text.replace(old, new)
        copy = tmp_path / "collectives.py"
        if compared:
            # PyTorch reads the variable when it is imported, which was before the run.
            text = text.replace(IMPORT, f"{IMPORT}dist.set_debug_level_from_env()\n")
            copy.write_text(text)
            env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
            return run(copy, "--timeout", 200, status=status, env=env)
        copy.write_text(text)
        return run(copy, "--timeout", 20, status=status)

    return ran


IMPORT = "import torch.distributed as dist\n"
REDUCE, BROADCAST = "    dist.all_reduce(mine)\n", "    dist.broadcast(mine, src=0)\n"
SKIPPED = f"    if rank != 1:\n    {REDUCE}"
ORDERED = """    ones = torch.ones_like(mine)
    for tensor in (mine, ones) if rank == 0 else (ones, mine):
        dist.all_reduce(tensor)
"""
SHORT_REDUCE = "    dist.all_reduce(mine[:1] if rank == 0 else mine)\n"
SHORT_BROADCAST = "    dist.broadcast(mine[:1] if rank == 0 else mine, src=0)\n"


def test_a_rank_that_skips_a_collective(broken):
    """Rank 0 waits in it, rank 1 in the next one, until the timeout. PyTorch can name both."""
    done = broken(REDUCE, SKIPPED, 1)
    assert list(tables(done.stdout)) == list(expected(2))[:7]  # all that come before
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: ") and re.search("Timed out waiting|by peer", last)
    assert "OpType=ALLREDUCE" in broken(REDUCE, SKIPPED, 1, compared=True).stderr


@pytest.mark.parametrize("compared", [False, True])
def test_two_all_reduces_in_a_different_order(broken, compared):
    """There is no error: the numbers of one rank are added to the ones of the other."""
    shown = tables(broken(REDUCE, ORDERED, 0, compared).stdout)["all_reduce"]
    assert [after for (_, after), _ in shown.values()] == [[11.0, 12.0], [21.0, 22.0]]


def test_a_broadcast_of_a_different_size(broken):
    """gloo fills in what arrives, without an error. PyTorch sees two shapes if it compares them."""
    out = broken(BROADCAST, SHORT_BROADCAST, 0).stdout
    assert tables(out)["broadcast"][1][0] == [[20.0, 21.0], [10.0, 21.0]]
    done = broken(BROADCAST, SHORT_BROADCAST, 1, compared=True)
    assert re.search("Tensor shapes: (1vs 2|2vs 1)", done.stderr)


def test_an_all_reduce_of_a_different_size(broken):
    """It ends with an error, after the timeout or at once."""
    done = broken(REDUCE, SHORT_REDUCE, 1)
    assert list(tables(done.stdout)) == list(expected(2))[:7]
    assert "Timed out waiting" in done.stderr or "signal SIGABRT" in done.stderr
