"""The lesson on experts: losses, messages and gradients."""

import copy
import functools
import re

import expert_parallel as lesson
import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, run
from torch import nn

from watching.messages import Messages
from watching.ranks import call

FLAGS = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--tokens", 7, "--double")


def test_the_numbers_and_the_load():
    """Four ranks print the loads of one, and its losses to 1e-10. --balance makes loads equal."""
    largest, before = [], None
    for processes, balance in ((1, 0), (1, 0.1), (4, 0.1)):
        out = run("expert_parallel", *FLAGS, "--balance", balance, processes=processes).stdout
        rows = re.findall(r"^block \d: its experts get (.*) of the tokens$", out, re.M)
        largest.append([max(map(int, re.findall(r"\d+", row))) for row in rows])
        lines = epochs(out)
        if processes == 4:
            assert lines == [pytest.approx(line, abs=1e-10) for line in before]
        before = lines
    assert largest[2] == largest[1] and sum(largest[1]) < sum(largest[0])


def whole_forward(mixture, tokens):
    """Compute a mixture that has all experts, token by token, and its term of the loss."""
    scores = mixture.router(tokens).softmax(-1)
    score, expert = scores.max(-1)
    outputs = []
    for token, number in zip(tokens, expert.tolist(), strict=True):
        outputs.append(mixture.experts[str(number)](token))
    fractions = expert.bincount(minlength=mixture.count) / len(tokens)
    balance = mixture.count * (fractions * scores.mean(0)).sum()
    return torch.stack(outputs) * score[:, None], balance


def mean_gradients(rank, only_first):
    """Outputs and gradients are those of one process, and each row for another rank is sent."""
    torch.set_default_dtype(torch.float64)
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    experts = [lesson.make_expert(6) for _ in range(2 * world_size)]
    whole = lesson.Mixture(experts[0], 2 * world_size)
    whole.experts = nn.ModuleDict({str(number): mlp for number, mlp in enumerate(experts)})
    parts = torch.randn(world_size, 1, 7, 6)
    if only_first:
        whole.router.weight.data[1:] = 0
        parts = parts.abs() * whole.router.weight.detach()[0].sign()  # so all scores are above 0
    mine = copy.deepcopy(whole)
    own = list(mine.experts.items())[2 * rank : 2 * rank + 2]
    mine.experts = nn.ModuleDict(own)
    model = nn.Sequential(mine)
    tokens = parts[rank].clone().requires_grad_()
    with Messages() as messages:
        outputs = model(tokens)
        (outputs.square().mean() + lesson.balance_loss(model)).backward()
    lesson.average_gradients(model)
    rows = parts.flatten(0, 2).requires_grad_()
    right, balance = whole_forward(whole, rows)
    (right.square().mean() + balance).backward()
    close = functools.partial(torch.testing.assert_close, atol=1e-12, rtol=0)
    close(outputs[0], right.view(world_size, 7, 6)[rank])
    close(tokens.grad[0] / world_size, rows.grad.view(world_size, 7, 6)[rank])
    close(mine.router.weight.grad, whole.router.weight.grad)
    for number, expert in enumerate(mine.experts.values()):
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
    call(mean_gradients, 3, only_first)
