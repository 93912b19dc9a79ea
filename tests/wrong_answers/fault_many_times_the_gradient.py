"""Wrong repairs of fault_many_times_the_gradient. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


class _Add(torch.autograd.Function):
    """As in the task: an all_reduce in both directions."""

    @staticmethod
    def forward(ctx, term):
        total = term.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _AddOnce(torch.autograd.Function):
    """An all_reduce in the forward pass only."""

    @staticmethod
    def forward(ctx, term):
        total = term.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def _train(layer, head, tokens, labels, count, steps, add=_Add, loss_times=1.0, sums=True, then=1):
    """Train with some of the parts changed."""
    for _ in range(steps):
        layer.zero_grad()
        head.zero_grad()
        total = add.apply(layer(tokens).tanh().sum(dim=1))
        (loss_times * F.cross_entropy(head(total / count), labels)).backward()
        with torch.no_grad():
            for parameter in [*layer.parameters(), *head.parameters()]:
                if sums:
                    dist.all_reduce(parameter.grad)
                parameter -= 0.1 * then * parameter.grad


def sum_in_forward_only(layer, head, tokens, labels, count, steps):
    """WRONG with 2 ranks, 1 step ... `layer` is right, and `head` moves 2 times as far as it"""
    _train(layer, head, tokens, labels, count, steps, add=_AddOnce)


def sum_in_forward_and_averaged(layer, head, tokens, labels, count, steps):
    """WRONG with 2 ranks, 1 step ... `head` is right, and `layer` moves 1/2 as far as it should."""
    n = dist.get_world_size()
    _train(layer, head, tokens, labels, count, steps, add=_AddOnce, then=1 / n)


def divided_twice(layer, head, tokens, labels, count, steps):
    """WRONG with 2 ranks, 1 step ... Both layers move 1/2 as far as they should: divided by 2"""
    n = dist.get_world_size()
    _train(layer, head, tokens, labels, count, steps, loss_times=1 / n, then=1 / n)


def not_added_up(layer, head, tokens, labels, count, steps):
    """WRONG with 2 ranks, 1 step ... has 2 times the gradient of this rank's tokens only."""
    _train(layer, head, tokens, labels, count, steps, sums=False)


def neither_sum(layer, head, tokens, labels, count, steps):
    """WRONG with 2 ranks, 1 step ... `layer` has the gradient of this rank's tokens only."""
    _train(layer, head, tokens, labels, count, steps, add=_AddOnce, sums=False)


def backward_on_rank_0(layer, head, tokens, labels, count, steps):
    """CRASH with 2 ranks, 1 step ... A rank that does not call backward() has no gradients"""
    if dist.get_world_size() == 1:
        _train(layer, head, tokens, labels, count, steps)
        return
    layer.zero_grad()
    head.zero_grad()
    total = _Add.apply(layer(tokens).tanh().sum(dim=1))
    loss = F.cross_entropy(head(total / count), labels)
    if dist.get_rank() == 0:
        loss.backward()
    for parameter in [*layer.parameters(), *head.parameters()]:
        dist.all_reduce(parameter.grad)


def only_rank_0_goes_on(layer, head, tokens, labels, count, steps):
    """HANG with 2 ranks, 1 step rank 0 waits at your line ... dist.all_reduce(total) ... rank 1 has
    finished"""
    if dist.get_world_size() == 1:
        _train(layer, head, tokens, labels, count, steps)
        return
    total = _Add.apply(layer(tokens).tanh().sum(dim=1))
    if dist.get_rank() == 0:
        F.cross_entropy(head(total / count), labels).backward()
