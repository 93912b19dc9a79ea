"""Gradient accumulation with DDP: the gradient of a batch that does not fit into memory at once.

Lesson: replicated/resnet.py.

Write `accumulate_gradients(model, images, labels, count)`. The model is wrapped by DDP. Its
gradients are None. Each rank calls the function with its per-rank batch: images, and their labels.
All ranks have the same number of images. The function splits the batch into `count` micro-batches,
or into fewer if there are fewer images. It runs `forward()` and `backward()` for each of them in
turn. The loss is `F.cross_entropy`. Afterwards each `parameter.grad` is the gradient of the mean
loss of the global batch, as if each rank had computed its whole batch at once.

In rung 1, `count` divides the number of images. Your answer passes it if
- the gradients are right;
- a micro-batch has at most ceil(images / count) images, and its `backward()` follows its
  `forward()`, so that only one micro-batch is in memory at a time;
- the next call works as well.

Rung 2 is any number of images. Your answer passes it if
- all of rung 1 holds;
- each gradient travels once, in the messages that DDP sends in one `backward()`.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/accumulate_gradients.py
"""

from contextlib import nullcontext

import torch
from check import check
from torch.nn import functional as F


def accumulate_gradients(model, images, labels, count):
    """Compute the gradient of the global batch in micro-batches, with one round of messages."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
