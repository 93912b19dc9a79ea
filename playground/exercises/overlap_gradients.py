"""Average the gradients while `backward()` still computes others.

Lesson: replicated/overlapped_data_parallel.py.

Write `overlap_gradients(model)`. It is called once, before training. It registers hooks, and
returns a function `finish()`. A training step then calls `zero_grad()`, which sets all gradients to
None, `forward()`, `backward()`, `finish()`, and the optimizer's `step()`. The hooks start messages
while `backward()` computes. `finish()` waits for them. After `finish()`, each `parameter.grad` is
the mean over all ranks. The function `message_of(parameter)` below is given, for rung 2.

Rung 1 is the lesson's own model, in which each parameter is float32 and gets a gradient, in the
same order on all ranks. Your answer passes it if
- the means are right, in each step;
- the gradients of all layers but the first have started to travel when `backward()` comes to the
  first layer;
- `backward()` waits for no other rank.

Rung 2 is any model:
- A parameter may be frozen (`requires_grad` is False) or tied (two layers share it).
- The ranks may run the layers in different orders, or leave some out. So `backward()` may compute
  the gradients in a different order on each rank. A gradient that is None on all ranks stays None.
  If it is None on some ranks, it counts as zero there, and those ranks get the mean as well.
- The parameters may have different dtypes (float16, float32 and float64).
Your answer passes it if
- all of rung 1 holds. If some parameters get no gradient, the others may travel later;
- in a step, each rank sends at most one message for each parameter, and one more. It sends the
  bytes of an all_reduce of the gradients. For each parameter, 8 more bytes are allowed, to find out
  which gradients exist.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/overlap_gradients.py
"""

import torch
import torch.distributed as dist
from check import check


def message_of(parameter):
    """Return the gradient divided by n, as a tensor with one axis, and a flag at its end.

    A missing gradient counts as zero. The flag is above 0 if this rank has a gradient. When such
    messages are added up over n ranks, the sum has the mean gradient. Its last number is above 0 if
    any rank has a gradient.
    """
    missing = parameter.grad is None
    gradient = torch.zeros_like(parameter) if missing else parameter.grad
    flag = gradient.new_tensor([0.0 if missing else 1.0])
    return torch.cat([gradient.detach().flatten(), flag]) / dist.get_world_size()


def overlap_gradients(model):
    """Register hooks that start messages with gradients. Returns finish(), which ends a step."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
