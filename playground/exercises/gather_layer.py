"""A layer whose parameters are whole only while it computes, as in stage 3 of ZeRO and in FSDP.

Lesson: sharded/manual_fully_sharded.py.

Write the autograd function GatherLayer. Each rank has one shard of a layer's parameters: 1/n of the
numbers, in the order of the ranks. Each rank also has inputs of its own.

`compute(inputs, flat)` is the forward pass of the layer, in plain PyTorch. `flat` is a tensor with
one axis. It contains all shards, one after another. Zeros at its end make all shards equally long,
and `compute()` ignores them. It draws no random numbers.

`forward()` gathers the shards, and returns what `compute()` returns. `backward()` gathers them
again, and runs `compute()` again, because autograd records nothing inside `forward()`.

Rung 1 is a linear layer. Your answer passes it if
- the output is right, and so are the gradients. The gradient of `shard` is this rank's shard of the
  mean gradient over all ranks. The gradient of `inputs` is not averaged, because each rank has
  inputs of its own.

Rung 2 is any layer, even if `inputs` are integers, and any dtype of the parameters. Your answer
passes it if
- all of rung 1 holds;
- from `forward()` to `backward()`, and afterwards, this rank keeps its shard and `inputs`, but
  neither the whole parameters nor what was computed from them;
- a step sends two all_gathers and one reduce_scatter. If `shard` needs no gradient, because the
  layer is frozen, there is no reduce_scatter. `ctx.needs_input_grad` shows whether it is.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/gather_layer.py
"""

import torch
import torch.distributed as dist
from check import check


class GatherLayer(torch.autograd.Function):
    """A layer of which this rank keeps a shard. It is gathered in forward() and in backward()."""

    @staticmethod
    def forward(ctx, inputs, shard, compute):
        """Return compute(inputs, flat), where flat has the shards of all ranks."""
        raise NotImplementedError("your turn")

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of inputs and shard, and None for compute."""
        raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
