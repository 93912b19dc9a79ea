"""Find the fault: with n ranks, the gradient is n times too large.

Lesson: transformer/sequence_parallel.py.

`train(layer, head, tokens, labels, count, steps)` trains two linear layers. Each rank has some of
the tokens of every image, and all ranks have all labels. `layer` computes each token by itself. The
mean over the `count` tokens of an image, which are on all ranks, gives `head` its input. After each
step, the layers should be those of a single process which has all tokens. But with n ranks, each
step is n times as long. Find the fault, and repair it, in train or in Add.

It is repaired if
- all ranks have the layers of a single process, however many tokens each rank has;
- this holds after several steps, too.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_many_times_the_gradient.py
"""

import torch
import torch.distributed as dist
from check import check
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
        loss.backward()
        with torch.no_grad():
            for parameter in parameters:
                dist.all_reduce(parameter.grad)  # each rank has the part of its own tokens
                parameter -= 0.1 * parameter.grad


if __name__ == "__main__":
    check(__file__)
