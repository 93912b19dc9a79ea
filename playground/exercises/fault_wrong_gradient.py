"""Find the fault: the gradient is not that of the global batch.

Lesson: manual_data_parallel.py.

`train(model, images, labels, steps)` trains one model on all ranks. Each rank has images of its
own, and uses all of them in each step. The loss is the mean over the images of all ranks, so the
model should be the same as if a single process had all these images. But it is not the same when
some ranks have more images than others. Find the fault, and repair train.

It is repaired if
- all ranks have the model of a single process, however many images each rank has;
- a rank may also have no images, as long as there is an image on some rank.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_wrong_gradient.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def train(model, images, labels, steps):
    """Train on this rank's images. All ranks have the same model, without frozen parameters."""
    for _ in range(steps):
        model.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


if __name__ == "__main__":
    check(__file__)
