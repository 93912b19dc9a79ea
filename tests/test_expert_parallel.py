"""The lesson on experts: losses, messages, gradients, and what breaks it."""

import copy
import functools
import re

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, fails, lesson_path, losses, one_line, train
from forked import in_group
from torch import nn

LESSON = "expert_parallel"
ONE_EPOCH = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--tokens", 7, "--double")
BALANCED = (*ONE_EPOCH, "--balance", 0.1)
LOAD = r"^block \d: its experts get (.*) of the tokens$"
ENV = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@functools.cache
def printed(*flags, processes):
    """Return what the lesson prints with these flags, which run only once."""
    done = train(LESSON, *flags, processes=processes)
    assert not done.stderr
    return done.stdout


def loads(out):
    """Return the percentages of each block's experts."""
    return re.findall(LOAD, out, re.M)


def test_any_number_of_ranks_computes_the_same():
    """The losses to 1e-10, and the tokens of each expert."""
    one = printed(*BALANCED, processes=1)
    for processes in (2, 4):
        out = printed(*BALANCED, processes=processes)
        assert losses(out) == pytest.approx(losses(one), abs=1e-10)
        assert loads(out) == loads(one)
        assert epochs(out)[0]["test"] == epochs(one)[0]["test"]


def largest_loads(*flags):
    """Return the percentages of the experts that get most, for each block."""
    largest = []
    for row in loads(printed(*flags, processes=2)):
        percent = [int(number) for number in re.findall(r"\d+", row)]
        assert 97 <= sum(percent) <= 103
        largest.append(max(percent))
    return largest


def test_balance_evens_the_load():
    """With --balance, the experts that get most get less."""
    assert sum(largest_loads(*BALANCED)) < sum(largest_loads(*ONE_EPOCH))


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (3, (), ("3 ranks cannot divide --experts 4: use 3",)),
        (2, ("--experts", 1), ("--experts 1: use 2",)),
        (2, ("--model", "mlp"), ("--model mlp has no tokens", "use --model transformer")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = ENV | {"WORLD_SIZE": f"{ranks}"}
    one_line(main(LESSON, *DIGITS, "--batch_size", 120, *flags, env=env), *words)


def test_the_example_in_the_docstring():
    """The rows follow from the tokens."""
    text = lesson_path(LESSON).read_text()
    rows = {}
    example = r"^        (\w.*?)  +rank 0: (.*?)  +rank 1: (.*)$"
    for name, left, right in re.findall(example, text, re.M):
        rows[name] = left, right
    ordered = [sorted(row.split(), key=lambda token: token[0]) for row in rows["tokens"]]
    sent = []  # for each rank, what goes to rank 0 and to rank 1
    for row in ordered:
        sent.append([[t for t in row if t[0] in "AB"], [t for t in row if t[0] in "CD"]])
    shown = [" | ".join(" ".join(part) for part in parts) for parts in sent]
    assert list(rows["sorted by expert"]) == list(rows["all_to_all back"]) == shown
    assert rows["in the old order"] == rows["tokens"]
    for row, counts in zip(ordered, rows["counts of A B C D"], strict=True):
        experts = [token[0] for token in row]
        assert [int(count) for count in counts.replace("|", "").split()] == [
            experts.count(expert) for expert in "ABCD"
        ]
    arrived = [" | ".join(" ".join(parts[rank]) for parts in sent) for rank in range(2)]
    assert list(rows["all_to_all"]) == arrived


def whole_forward(mixture, tokens):
    """Compute a mixture that has all experts, token by token."""
    score, expert = mixture.router(tokens).softmax(-1).max(-1)
    outputs = []
    for token, number in zip(tokens, expert.tolist(), strict=True):
        outputs.append(mixture.experts[number](token))
    return torch.stack(outputs) * score[:, None]


def mean_gradients(rank, only_first):
    """Outputs and gradients are those of one process, and each row for another rank is sent."""
    import expert_parallel as lesson

    from figures.messages import Messages

    torch.set_default_dtype(torch.float64)
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    experts = [lesson.make_expert(6) for _ in range(2 * world_size)]
    whole = lesson.Mixture(experts[0], 2 * world_size)
    whole.experts = nn.ModuleList(experts)
    parts = torch.randn(world_size, 1, 7, 6)
    if only_first:
        whole.router.weight.data[1:] = 0
        parts = parts.abs() * whole.router.weight.detach()[0].sign()  # so all scores are above 0
    mine = copy.deepcopy(whole)
    mine.experts = mine.experts[2 * rank : 2 * rank + 2]
    tokens = parts[rank].clone().requires_grad_()
    with Messages() as messages:
        outputs = mine(tokens)
        outputs.square().mean().backward()
    lesson.average_gradients(nn.Sequential(mine))  # as part of a model
    rows = parts.flatten(0, 2).requires_grad_()
    right = whole_forward(whole, rows)
    right.square().mean().backward()
    close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=0)
    close(outputs[0], right.view(world_size, 7, 6)[rank])
    close(tokens.grad[0] / world_size, rows.grad.view(world_size, 7, 6)[rank])
    close(mine.router.weight.grad, whole.router.weight.grad)
    for number, expert in enumerate(mine.experts):
        pairs = zip(expert.parameters(), experts[2 * rank + number].parameters(), strict=True)
        for parameter, other in pairs:
            wanted = torch.zeros_like(parameter) if other.grad is None else other.grad
            close(parameter.grad, wanted)
    assert len(messages.of("all_to_all")) == 5
    everything = [None] * world_size
    dist.all_gather_object(everything, (messages.sent("all_to_all"), mine.load.tolist()))
    rows_sent = 0
    for source, (_, load) in enumerate(everything):
        rows_sent += sum(load) - sum(load[2 * source : 2 * source + 2])
    counts = world_size * (world_size - 1) * 2 * 8
    assert sum(sent for sent, _ in everything) == 4 * rows_sent * 6 * 8 + counts
    if only_first:
        assert [load[0] for _, load in everything] == [7] * world_size


@pytest.mark.parametrize("only_first", [False, True])
def test_gradients_and_bytes(only_first):
    """To 1e-12, also if all tokens go to one rank. The bytes are those of rows for other ranks."""
    in_group(mean_gradients, 3, only_first)


THERE = ("arrived = Exchange.apply(", "arrived = all_to_all(")
BACK = ("return Exchange.apply(", "return all_to_all(")
AVERAGED = ('if ".experts." not in name:', "if True:")
OWN_LOAD = ("    dist.all_reduce(load)\n", "")


@pytest.mark.parametrize("pair", [THERE, AVERAGED, OWN_LOAD])
def test_silent_faults(pair, change):
    """Exercises 1, 2 and 3: no error, but other losses."""
    flags = BALANCED if pair is OWN_LOAD else ONE_EPOCH
    right = losses(printed(*flags, processes=2))
    out = train(change(LESSON, pair), *flags, processes=2).stdout
    assert abs(losses(out)[0] - right[0]) > 1e-6


def test_without_a_gradient_of_the_experts(change):
    """Exercise 1: experts have no gradient, which average_gradients needs."""
    told = fails(change(LESSON, BACK), *ONE_EPOCH, processes=2)
    assert "unsupported operand type(s) for /=: 'NoneType' and 'int'" in told


def test_experts_without_tokens(change):
    """Exercise 4: it trains, until experts without tokens are skipped."""
    order = "        order = expert.argsort()"
    one = (order, f"        expert = torch.zeros_like(expert)\n{order}")
    out = train(change(LESSON, one), *ONE_EPOCH, processes=2).stdout
    assert loads(out) == ["100%, 0%, 0%, 0%"] * 2
    line = "            outputs[mine] = mlp(arrived[mine])"
    skip = (line, f"            if mine.any():\n    {line}")
    told = fails(change(LESSON, one, skip), *ONE_EPOCH, "--timeout", 4, processes=2)
    assert "return all_to_all(gradient, ctx." in told  # rank 0
    assert "dist.all_reduce(parameter.grad)" in told  # rank 1
