"""The exact loss and accuracy, even if the ranks have different numbers of images.

Lesson: distributed_data_parallel.py.

Write `exact_accuracy(model, batches)`. The images of a test set are divided among the ranks. Each
rank calls the function with its own batches, a list of pairs (images, labels). The model is the
same on all ranks, and not wrapped by DDP.

On each rank it returns two numbers. The first is the mean of `F.cross_entropy` over all images of
all ranks. The second is the fraction of these images that the model recognizes. It recognizes an
image if `logits.argmax(dim=1)` is its label.

In rung 1, all batches have the same size, and all ranks the same number of batches. Your answer
passes it if
- both numbers are those of a single process that tests all images;
- the model computes in evaluation mode: dropout does nothing, and batch norm keeps its buffers;
- autograd is off, so that a batch needs no memory for `backward()`.

In rung 2, batches may have different sizes. The ranks may have different numbers of batches, and a
rank may have none. At least one rank has an image. Your answer passes it if
- all of rung 1 holds;
- each rank sends one message of at most three numbers of 8 bytes.

The model and the images may be on a GPU. Then the message must be on it, too, because NCCL cannot
send CPU tensors. (The check runs on CPUs, so it cannot notice this.)

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/exact_accuracy.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def exact_accuracy(model, batches):
    """Return the mean loss and the accuracy over all images of all ranks."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
