"""The lesson on experts: losses, loads and messages."""

import re

import expert_parallel as lesson
import pytest
import torch
from launch import DIGITS, epochs, run

from watch_ranks.messages import Messages
from watch_ranks.ranks import call

FLAGS = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--tokens", 7, "--double")


def test_the_numbers_and_the_load():
    """Four ranks print the loads of one, and its losses to 1e-10. --balance makes loads equal."""
    largest, before = [], None
    both = ("--top", 2, "--balance", 0.1, "--bias", 0.01)
    for processes, *own in ((1, "--top", 2), (1, *both), (4, *both, "--ep", 2)):
        out = run("expert_parallel", *FLAGS, *own, processes=processes).stdout
        rows = re.findall(r"^block \d: its experts get (.*) of the tokens$", out, re.M)
        largest.append([max(map(int, re.findall(r"\d+", row))) for row in rows])
        lines = epochs(out)
        if processes == 4:
            assert lines == [pytest.approx(line, abs=1e-10) for line in before]
        before = lines
    assert largest[2] == largest[1] and sum(largest[1]) < sum(largest[0])


def all_to_one(rank):
    """All tokens of three ranks need expert 0 of 6."""
    torch.manual_seed(0)
    mixture = lesson.Mixture(lesson.make_expert(8), 6, top=1, group=None)
    mixture.router.weight.data.zero_()[0] = 1
    tokens = torch.rand(1, 7, 8, requires_grad=True)
    with Messages() as messages:
        mixture(tokens).square().sum().backward()
    assert mixture.load.tolist() == [7, 0, 0, 0, 0, 0]
    assert tokens.grad.abs().min() > 0
    for number, expert in mixture.experts.items():
        assert all(each.grad.any() == (number == "0") for each in expert.parameters())
    # The counts, the tokens and the outputs. Then the gradients of both.
    assert len(messages.of("all_to_all")) == 5
    rows = 7 if rank else 14
    assert messages.sent("all_to_all") == 2 * 2 * 8 + 2 * rows * 8 * 4


def test_experts_without_tokens():
    """A rank that gets no tokens takes part in all messages, so none waits for it."""
    call(all_to_one, 3)
