"""The collectives: what every rank holds afterwards, the bytes of a ring, and calls that do not fit together."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import Lesson, free_port, lesson_path, run, train


def tables(out):
    """Return the tables in the lesson's output: by name, for each rank the lists it has held, and what is said then."""
    found = {}
    for name, rows in re.findall(r"^(\w+)[:,] .*\n((?:rank \d+: .*\n)+)", out, re.M):
        shown = {}
        for rank, line in re.findall(r"^rank (\d+): (.*)$", rows, re.M):
            lists = [[float(x) for x in part.split(",") if x] for part in re.findall(r"\[(.*?)\]", line)]
            shown[int(rank)] = (lists, line.rpartition("], ")[2])
        assert list(shown) == list(range(len(shown)))
        found["both" if name in found else name] = shown  # the last table begins with reduce_scatter, too
    return found


def expected(n):
    """Return what the tables must show for n ranks, from lists and the formulas for S bytes on each rank."""
    before = [[10.0 * (rank + 1) + chunk for chunk in range(n)] for rank in range(n)]
    sums = [sum(column) for column in zip(*before, strict=True)]
    own = [before[rank][rank] for rank in range(n)]
    size, root, others = 4 * n, [rank == 0 for rank in range(n)], [rank > 0 for rank in range(n)]
    share = size * (n - 1) // n
    after_and_sent = {
        "broadcast": ([before[0]] * n, [size] * (n - 1) + [0]),
        "scatter": ([[number] for number in before[0]], [share * here for here in root]),
        "gather": ([own] + [[]] * (n - 1), [size // n * here for here in others]),
        "all_gather": ([own] * n, [share] * n),
        "reduce": ([sums] + [[]] * (n - 1), [size * here for here in others]),
        "reduce_scatter": ([[number] for number in sums], [share] * n),
        "all_to_all": ([list(column) for column in zip(*before, strict=True)], [share] * n),
        "all_reduce": ([sums] * n, [2 * share] * n),
    }
    return {
        name: {rank: ([before[rank], after[rank]], f"sends {sent[rank]} bytes") for rank in range(n)}
        for name, (after, sent) in after_and_sent.items()
    } | {"both": {rank: ([before[rank], [sums[rank]], sums], "as all_reduce: True") for rank in range(n)}}


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_tables(processes):
    """Each collective's table has the numbers and bytes that lists and formulas give; also alone."""
    assert tables(train("collectives", processes=processes).stdout) == expected(processes)


def counted(rank, world_size, port, results):
    """Count the bytes that the ring of nonblocking_p2p.py sends, beside what the lesson says of its all_reduce."""
    import collectives
    import nonblocking_p2p

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    numbers, sent = torch.ones(world_size * 5), 0
    plain = dist.batch_isend_irecv

    def batch(operations):
        nonlocal sent
        sent += sum(operation.tensor.nbytes for operation in operations if operation.op is dist.isend)
        return plain(operations)

    nonblocking_p2p.dist.batch_isend_irecv = batch
    nonblocking_p2p.ring_all_reduce(numbers)
    nonblocking_p2p.dist.batch_isend_irecv = plain
    _, chunks = collectives.all_reduce(numbers.clone(), rank, world_size)
    results[rank] = sent, chunks * numbers.nbytes // world_size
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_formula_is_what_the_ring_sends(world_size):
    """The messages of the ring that is made by hand, counted: 2(n-1)/n of the buffer, as the lesson prints."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(counted, (world_size, free_port(), results), world_size, start_method="fork")
        size = 4 * 5 * world_size
        assert dict(results) == {rank: (2 * (world_size - 1) * size // world_size,) * 2 for rank in range(world_size)}


def test_ranks_started_by_hand():
    """RANK and the rest in the environment: each process is one rank and starts no others."""
    meet = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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


@pytest.mark.parametrize(
    ("flags", "words"),
    [(("-g", 0), "--gpus 0"), (("-n", 2), "-ip"), (("--backend", "nccl", "--device", "cpu"), "gloo")],
)
def test_flags_that_can_not_work(flags, words, main):
    """Status 2 and one line."""
    (line,) = main("collectives", *flags).stderr.strip().splitlines()
    assert "error: " in line and words in line


@pytest.fixture
def broken(tmp_path):
    """Return a function that runs the lesson with a line replaced, and maybe with PyTorch's comparison of calls."""

    def ran(old, new, status, compared=False):
        text = lesson_path("collectives").read_text()
        start = text.index('"""', 3)
        assert text.count(old) == text[start:].count(old) == 1
        copy = tmp_path / "collectives.py"
        copy.write_text(text.replace(old, new))
        if compared:  # cold: PyTorch reads the variable when it is imported
            return run(copy, "--timeout", 200, status=status, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, cold=True)
        return run(copy, "--timeout", 20, status=status)

    return ran


REDUCE, BROADCAST = "    dist.all_reduce(mine)\n", "    dist.broadcast(mine, src=0)\n"
SKIPPED = f"    if rank == 0:\n    {REDUCE}"
ORDERED = """    ones = torch.ones_like(mine)
    for tensor in (mine, ones) if rank == 0 else (ones, mine):
        dist.all_reduce(tensor)
"""
SHORT_REDUCE = "    dist.all_reduce(mine[:1] if rank == 0 else mine)\n"
SHORT_BROADCAST = "    dist.broadcast(mine[:1] if rank == 0 else mine, src=0)\n"


def test_a_rank_that_skips_a_collective(broken):
    """Rank 0 waits in it, rank 1 in the next one, until the timeout; PyTorch names both if it compares the calls."""
    done = broken(REDUCE, SKIPPED, 1)
    assert list(tables(done.stdout)) == list(expected(2))[:7]  # all that come before
    assert "another rank has ended, is in another collective" in done.stderr.splitlines()[-1]
    assert "OpType=ALLREDUCE" in broken(REDUCE, SKIPPED, 1, compared=True).stderr


@pytest.mark.parametrize("compared", [False, True])
def test_two_all_reduces_in_another_order(broken, compared):
    """Nobody complains: the numbers of one rank are added to the ones of the other."""
    out = broken(REDUCE, ORDERED, 0, compared).stdout
    assert [after for (_, after), _ in tables(out)["all_reduce"].values()] == [[11.0, 12.0], [21.0, 22.0]]


def test_a_broadcast_of_another_size(broken):
    """gloo fills what has come, and says nothing; PyTorch sees two shapes if it compares the calls."""
    out = broken(BROADCAST, SHORT_BROADCAST, 0).stdout
    assert tables(out)["broadcast"][1][0] == [[20.0, 21.0], [10.0, 21.0]]
    assert re.search("Tensor shapes: (1vs 2|2vs 1)", broken(BROADCAST, SHORT_BROADCAST, 1, compared=True).stderr)


def test_an_all_reduce_of_another_size(broken):
    """It ends, after the timeout or at once."""
    done = broken(REDUCE, SHORT_REDUCE, 1)
    assert list(tables(done.stdout)) == list(expected(2))[:7]
    assert done.stderr.splitlines()[-1].startswith("error: ")
