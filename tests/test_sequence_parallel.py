"""The sequence parallelism lesson: one process's numbers, its messages, and its exercises."""

import re

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, losses, one_line, single_gpu, train
from forked import in_group

LESSON = "sequence_parallel"
TRANSFORMER = ("--model", "transformer", "--double")
STEPS = (*DIGITS, "--batch_size", 120, "--epochs", 1, *TRANSFORMER)
SMALL = ("--tokens", 4, "--width", 8, "--layers", 1)
ROW = r"^(\w+) +(all_reduce|all_gather|reduce_scatter|send) +(\d+) +(\d+) +([\d,]+) +([\d,]+)$"
KEPT = r"^kept for backward\(\): ([\d,]+) bytes$"


def messages(out):
    """Return the table of messages: the numbers of each axis and collective."""
    rows = re.findall(ROW, out, re.M)
    return {row[:2]: [int(number.replace(",", "")) for number in row[2:]] for row in rows}


def kept(out):
    """Return the bytes that are kept for backward()."""
    [number] = re.findall(KEPT, out, re.M)
    return int(number.replace(",", ""))


def one_process(*flags):
    """Return the losses of single_gpu.py."""
    return [line["loss"] for line in single_gpu(*STEPS, *flags)]


@pytest.mark.parametrize(
    ("processes", "flags", "network"),
    [
        (1, ("--sequence",), SMALL),
        (1, ("--sequence", "--by", "dtensor"), SMALL),
        (2, (), SMALL),
        (2, ("--sequence",), ("--tokens", 4, "--width", 8)),
        (3, (), ("--heads", 3, "--width", 12, "--tokens", 4)),
        (4, ("--sequence",), SMALL),
        (2, ("--by", "dtensor"), SMALL),
        (4, ("--by", "dtensor", "--sequence"), SMALL),
    ],
)
def test_numbers_and_messages(processes, flags, network):
    """The losses of single_gpu.py to 1e-10, and the messages of the docstring's formulas."""
    done = train(LESSON, *STEPS, *network, *flags, processes=processes)
    assert not done.stderr
    assert losses(done.stdout) == pytest.approx(one_process(*network), abs=1e-10)
    table = messages(done.stdout)
    assert all(row[0] == row[1] and row[2] == row[3] for row in table.values())
    given = dict(zip(network[::2], network[1::2], strict=True))
    b = given.get("--layers", 2)
    width = given.get("--width", 32)
    size = 8 * 120 * given.get("--tokens", 28) * width
    in_ring = (processes - 1) / processes
    by_dtensor = "dtensor" in flags
    if by_dtensor and processes == 1:
        assert not table
    elif "--sequence" not in flags:
        assert table == {("tp", "all_reduce"): [4 * b] * 2 + [8 * b * in_ring * size] * 2}
    else:
        gathers = 4 * b + 1 + by_dtensor
        assert table["tp", "all_gather"][::2] == [gathers, gathers * in_ring * size]
        assert table["tp", "reduce_scatter"][::2] == [4 * b, 4 * b * in_ring * size]
        if by_dtensor:
            added_up = 3 * 4 * b * width  # of two norms, each time that Adam reads them
        else:
            pixels = 784 // given.get("--tokens", 28)
            embedding = width * (pixels + 1 + given.get("--tokens", 28))
            added_up = 6 * b * width + embedding
        assert table["tp", "all_reduce"][2] == 2 * in_ring * 8 * added_up


def test_what_is_kept():
    """With --sequence a rank keeps less, and as much as DTensor does."""
    runs = [(), ("--sequence",), ("--sequence", "--by", "dtensor")]
    outs = [train(LESSON, *STEPS, *SMALL, *flags, processes=2).stdout for flags in runs]
    whole, own, by_dtensor = map(kept, outs)
    assert own < whole
    assert by_dtensor == pytest.approx(own, rel=0.01)


def ends_of_pairs(rank):
    """The example of the docstring, whose tokens are a column of numbers."""
    import sequence_parallel as lesson

    first = torch.tensor([1.0, 2, 3, 4])
    terms = (first * 10**rank).view(1, 4, 1)
    terms.requires_grad_()
    group = dist.group.WORLD
    both = lesson.PairEnd.apply(terms, *lesson.ADD, group)
    assert both.flatten().tolist() == [11, 22, 33, 44]
    own = lesson.PairEnd.apply(terms, *lesson.SCATTER, group)
    assert own.flatten().tolist() == [[11, 22], [33, 44]][rank]
    again = lesson.PairEnd.apply(own, *lesson.GATHER, group)
    assert again.flatten().tolist() == [11, 22, 33, 44]
    # The gradient of GATHER is that of SCATTER's own tokens, added up over two ranks.
    again.backward(first.view(1, 4, 1))
    assert terms.grad.flatten().tolist() == [2, 4, 6, 8]
    bias = torch.zeros(1, requires_grad=True)
    tokens = lesson.OwnTokens(group)(torch.zeros(1, 4, 1)) + bias
    lesson.AllTokens(group)(tokens).backward(first.view(1, 4, 1))
    assert bias.grad.item() == [3, 7][rank]
    assert lesson.add_up(bias.grad, group).item() == 10
    copied = torch.ones(1, 4, 1, requires_grad=True)
    lesson.PairEnd.apply(copied, *lesson.COPY, group).backward(terms.detach())
    assert copied.grad.flatten().tolist() == [11, 22, 33, 44]


def test_the_example_in_the_docstring():
    """PyTorch computes its numbers."""
    in_group(ends_of_pairs, 2)


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (3, (), ("--heads 4 cannot be divided by 3 processes", "use --heads 3 --width 33")),
        (8, ("--width", 64), ("--heads 4", "use --heads 8 --width 64")),
        (8, ("--heads", 8, "--sequence"), ("--tokens 28", "8 processes: use --tokens 16")),
        (3, ("--heads", 3, "--width", 33, "--sequence"), ("--tokens 28", "leave --sequence out")),
        (2, ("--model", "mlp"), ("--model mlp has no heads", "use --model transformer")),
        (2, ("--by", "magic"), ("invalid choice", "dtensor")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, *flags, env=env), *words)


PARTS = "                dist.all_reduce(parameter.grad)\n"
JOINED = """        chunks[dist.get_rank(self.group)] = tokens
        return torch.cat(chunks, dim=1)
"""
ADDED = "        return PairEnd.apply(tokens, *GATHER, self.group)\n"
NEIGHBOURS = """    shards = parameter.detach().chunk(dist.get_world_size(group), dim)
    shard = shards[dist.get_rank(group)].clone()
"""
EVERY_NTH = """    size = parameter.shape[dim]
    every = torch.arange(dist.get_rank(), size, dist.get_world_size())
    shard = parameter.detach().index_select(dim, every)
"""
NORMS = "            if sequence:\n                # NEW: tells DTensor"


@pytest.mark.parametrize(
    ("flags", "old", "new", "apart"),
    [
        (("--sequence",), PARTS, "                pass\n", 1e-4),  # 1
        (("--sequence",), JOINED, ADDED, 1e-9),  # 2
        ((), NEIGHBOURS, EVERY_NTH, 1e-4),  # 3
        (("--sequence", "--by", "dtensor"), NORMS, NORMS.replace("sequence", "False"), 1e-6),  # 4
    ],
)
def test_wrong_without_an_error(flags, old, new, apart, change):
    """The four exercises: the loss differs, by little in the second and in the fourth."""
    copy = change(LESSON, (old, new))
    [found] = losses(train(copy, *STEPS, *SMALL, *flags, processes=2).stdout)
    [right] = one_process(*SMALL)
    assert apart < abs(found - right) < 0.1


def test_which_gradients_are_too_large(change):
    """Exercise 2: those before the last layer. Adam hardly notices, plain SGD does."""
    adam = "torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, foreach=False)"
    sgd = "torch.optim.SGD(model.parameters(), lr=args.lr)"
    flags = (*STEPS, *SMALL, "--sequence", "--lr", 0.1)
    wrong = losses(train(change(LESSON, (adam, sgd), (JOINED, ADDED)), *flags, processes=2).stdout)
    right = losses(train(change(LESSON, (adam, sgd)), *flags, processes=2).stdout)
    assert abs(wrong[0] - right[0]) > 1e-3


def test_the_mlp_may_be_split_in_any_way(change):
    """Exercise 3: its columns do not belong together. With the MLP alone the loss stays right."""
    of_mlp = EVERY_NTH.replace("    shard", "    if parameter.shape[dim] > 8:\n        shard")
    copy = change(LESSON, (NEIGHBOURS, NEIGHBOURS + of_mlp))
    found = losses(train(copy, *STEPS, *SMALL, processes=2).stdout)
    assert found == pytest.approx(one_process(*SMALL), abs=1e-10)


def test_updating_many_tensors_in_one_call(change):
    """Adam does so on GPUs, unless foreach=False: it fails with DTensors and plain tensors."""
    copy = change(LESSON, ("eps=1e-6, foreach=False", "eps=1e-6, foreach=True"))
    done = train(copy, *STEPS, *SMALL, "--by", "dtensor", processes=1, status=1)
    assert "got mixed torch.Tensor and DTensor" in done.stderr
