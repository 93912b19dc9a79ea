"""A pair of linear layers that is split between the ranks, forward and backward.

Lesson: split/tensor_parallel.py.

Write the autograd function SplitPair. It computes `linear(relu(linear(inputs)))`, and each rank has
a shard of the parameters. A single process would compute the following. Here g is the gradient of
the output, h is that of `hidden`, and .T swaps the rows and columns of a matrix:

    forward     hidden = relu(inputs @ first.T + first_bias)
                output = hidden @ second.T + second_bias

    backward    of hidden:       h = g @ second, but 0 where hidden is 0
                of inputs:       h @ first
                of first:        h.T @ inputs
                of first_bias:   the sum of h over the rows
                of second:       g.T @ hidden
                of second_bias:  the sum of g over the rows

With n ranks, each rank has some rows of `first`, the numbers of `first_bias` for them, and the same
columns of `second`. (nn.Linear stores a matrix transposed, so the lesson says columns and rows.)
`inputs` and `second_bias` are the same on all ranks, and so is the gradient g.

Rung 1 is a pair with biases, in which each rank has some rows. Your answer passes it if
- each rank gets the whole output, the whole gradient of `inputs`, and the gradients of its shards.

Rung 2 is any pair. Your answer passes it if
- all of rung 1 holds;
- it is right if a rank has no rows at all, and if a bias is None;
- there is one all_reduce in forward and one in backward. If `inputs` needs no gradient, there is
  none in backward: `ctx.needs_input_grad[0]` shows whether it does.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/split_pair.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


class SplitPair(torch.autograd.Function):
    """Two linear layers with ReLU between them, of which this rank has a shard."""

    @staticmethod
    def forward(ctx, inputs, first, first_bias, second, second_bias):
        """Return the whole output, (N, out). `inputs` is (N, in), and a bias may be None."""
        raise NotImplementedError("your turn")

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the five arguments, None for a bias that is None."""
        raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
