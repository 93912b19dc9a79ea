"""Average the gradients of a model, in one message.

Lesson: manual_data_parallel.py.

Write `average_gradients(model)`. Each rank has computed gradients with a copy of the same model.
When the function returns, each `parameter.grad` is the mean over all ranks.

Rung 1 is the lesson's own model, in which each parameter is float32 and has a gradient. Your answer
passes it if
- the means are right with any number of ranks.

Rung 2 is any model:
- A frozen parameter (`requires_grad` is False) has no gradient on any rank. It stays None.
- The gradient of another parameter may be None, too, because `forward()` did not use the parameter.
  If it is None on all ranks, it stays None. If it is None on some ranks, it counts as zero there,
  and those ranks get the mean as well, even if all numbers of the mean are 0.
- Two layers may share a parameter. (It is then called tied.)
- A parameter may have any shape, and the dtype float16, float32 or float64.
Take it in three steps, which the check tries in this order: one message for a model with tied and
frozen parameters, missing gradients, and three dtypes. There is a hint for each of them.
Your answer passes it if
- the means are right with any number of ranks, and have the dtype of their parameter;
- all gradients of one dtype travel in one message. One more message is allowed, to find out which
  gradients exist;
- each rank sends the bytes of an all_reduce of these gradients. For each parameter, 8 more bytes
  are allowed, to find out which gradients exist.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/average_gradients.py
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from check import check


def average_gradients(model):
    """Replace the gradient of each parameter with its mean over all ranks."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
