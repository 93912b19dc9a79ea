"""Shard the state of an optimizer: each rank updates one shard of the parameters (ZeRO, stage 1).

Lesson: sharded/sharded_optimizer.py.

Write the class ShardedOptimizer. `ShardedOptimizer(model, make_optimizer)` is made once on each
rank, with a copy of the same model. `make_optimizer(tensors)` returns an optimizer for a list of
tensors. It may be any optimizer that updates each number separately, such as SGD with momentum,
Adam or AdamW.

In each step, each rank computes its own gradients and then calls `step()`. This updates the
parameters of the model on all ranks with the mean gradient, as a single process would. Call
`make_optimizer` with this rank's shards only, so that it keeps 1/n of the state. The function
`padded(tensor)` below is given.

Rung 1 is the lesson's own model, in which each parameter is float32 and has a gradient. Your answer
passes it if
- the parameters are right after each step, on all ranks;
- the optimizer of a rank keeps state for at most ceil(S/n) of the S numbers of each parameter.

Rung 2 is any model:
- A parameter may be frozen (`requires_grad` is False) or tied (two layers share it).
- If a gradient is None on all ranks, the parameter and its state do not change, as with any
  optimizer. If it is None on some ranks, it counts as zero there.
- The parameters may be float16. So divide before the gradients are added up, because the sum may be
  too large for float16.
- A parameter may have any size, even fewer numbers than there are ranks.
Your answer passes it if
- all of rung 1 holds;
- in a step, each rank sends the bytes of a reduce_scatter of the gradients and of an all_gather of
  the parameters, each padded to a multiple of n. For each parameter, 8 more bytes are allowed, to
  find out which gradients exist.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/shard_optimizer.py
"""

import torch
import torch.distributed as dist
from check import check


def padded(tensor):
    """Return a copy with one axis, with zeros at its end, so that n divides its length."""
    flat = tensor.detach().flatten()
    zeros = flat.new_zeros(-len(flat) % dist.get_world_size())
    return torch.cat([flat, zeros])


class ShardedOptimizer:
    """Updates all parameters of a model, but keeps only this rank's shard of the state."""

    def __init__(self, model, make_optimizer):
        raise NotImplementedError("your turn")

    def step(self):
        """Update the parameters with the mean gradient over all ranks."""


if __name__ == "__main__":
    check(__file__)
