"""Find the fault: the gradients of two layers are mixed up.

Lesson: manual_data_parallel.py.

`train(model, images, labels, steps)` trains one model on all ranks. Each rank has the same number
of images. In each step the ranks average their gradients, the largest first. All ranks should have
the model of a single process that trains on all images. But some parameters change by the gradients
of other parameters. Find the fault, and repair train.

It is repaired if
- all ranks have the model of a single process;
- a parameter without a gradient stays as it is.

The gradients may also travel in a different order.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_mixed_gradients.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def train(model, images, labels, steps):
    """Train on this rank's images. The same parameters have a gradient on all ranks."""
    for _ in range(steps):
        model.zero_grad()
        F.mse_loss(model(images), labels).backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        # The largest gradients travel first.
        trained.sort(key=lambda parameter: parameter.grad.norm(), reverse=True)
        for parameter in trained:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in trained:
                parameter -= 0.01 * parameter.grad


if __name__ == "__main__":
    check(__file__)
