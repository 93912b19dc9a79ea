"""Why: all ranks compute the same loss. The sum over the ranks is the gradient of n losses."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


class Add(torch.autograd.Function):
    """Adds up a tensor over the ranks. Each rank then computes with the sum."""

    @staticmethod
    def forward(ctx, term):
        """Return the sum of the terms of all ranks."""
        total = term.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient):
        """Return the sum of the gradients of all ranks, because all of them use the term."""
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def train(layer, head, tokens, labels, count, steps):
    """Train on this rank's tokens, (N, tokens of this rank, 4). All ranks have the same layers."""
    parameters = [*layer.parameters(), *head.parameters()]
    for _ in range(steps):
        layer.zero_grad()
        head.zero_grad()
        total = Add.apply(layer(tokens).tanh().sum(dim=1))
        loss = F.cross_entropy(head(total / count), labels)
        loss = loss / dist.get_world_size()  # the losses of all ranks are then one loss
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                dist.all_reduce(parameter.grad)  # each rank has the part of its own tokens
                parameter -= 0.1 * parameter.grad
