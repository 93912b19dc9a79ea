"""A pipeline in the order of GPipe, with send and recv.

Lesson: split/manual_pipeline.py.

In the lesson, gpipe returns a list of passes, and Pipeline computes them. Here one function does
both, for stages that the lesson's Pipeline cannot train.

Write `gpipe(stage, inputs, labels, shape, dtype)`. Each rank calls it with its own stage of a
model. It computes the gradients of one step, as `backward()` does in a single process: it adds them
to `parameter.grad` of each parameter of its stage.

    stage     a module: the part of the model that this rank computes
    inputs    a list of tensors, the micro-batches. The same on all ranks; rank 0 computes with it
    labels    a list of tensors, their labels. The same on all ranks; the last rank computes the
              loss with it
    shape     the shape of what this stage receives for one row of a micro-batch
    dtype     the dtype of what this stage receives

The loss is `F.cross_entropy`, the mean over all rows of all micro-batches.

In rung 1, all micro-batches have the same number of rows. Your answer passes it if
- the gradients are those of a single process, and each rank computes one forward pass for each
  micro-batch;
- only send, recv, isend and irecv are used.

In rung 2, the last micro-batch may have fewer rows than the others, and any stage works: with
frozen parameters only, with an output that is not contiguous, with integers as the inputs of rank
0. Your answer passes it if
- all of rung 1 holds;
- it computes all forward passes first, and then all backward passes, so the ranks work at the same
  time: 2(n + m - 2) rounds of messages for n ranks and m micro-batches;
- for each micro-batch, a rank sends one message to the next rank (the output of its stage) and one
  to the previous rank (the gradient of its input).

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/gpipe.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def gpipe(stage, inputs, labels, shape, dtype):
    """Compute the gradients of this rank's stage in the order of GPipe."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
