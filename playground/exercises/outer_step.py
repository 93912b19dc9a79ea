"""The outer step of DiLoCo: after many steps alone, the ranks agree on their parameters.

Lesson: replicated/sending_less.py.

Write `outer_step(parameters, agreed, optimizer)`. Each rank has trained alone for many steps, and
now all ranks call the function:
- `parameters` is a list of the parameters of this rank's model, float32 and of any shape. They
  differ from rank to rank.
- `agreed` is a list of tensors of the same shapes, the same on all ranks: the parameters on which
  the ranks agreed the last time. All ranks have trained from there.
- `optimizer` is an optimizer of the tensors in `agreed`, the outer optimizer, with the same
  settings on all ranks: for example `torch.optim.SGD(agreed, lr=0.7, momentum=0.9, nesterov=True)`.

How far the ranks have gone from `agreed`, on average, serves as a gradient: the optimizer makes one
step with it, in the direction in which the ranks have gone. Then each rank continues from there:
its parameters become equal to `agreed`. With SGD, lr=1 and no momentum, all get the mean of the
ranks' parameters.

For example, all ranks agreed on [10.0] and two ranks have trained to [8.0] and [6.0]. The mean is
7.0. With SGD, lr=0.5 and no momentum, `agreed` and the parameters become [8.5] on both ranks.

Your answer passes if
- the parameters and `agreed` are right after each of three outer steps, on any number of ranks;
- each rank sends one message in each step, with the bytes of an all_reduce of all parameters.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/outer_step.py
"""

import torch
import torch.distributed as dist
from check import check


@torch.no_grad()
def outer_step(parameters, agreed, optimizer):
    """Move `agreed` where the ranks have gone on average, and let this rank continue from there."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
