"""Find the fault: some ranks lose the connection.

Lesson: distributed_data_parallel_torchrun.py.

`train(model, images, labels, limit)` is a whole program for each rank: it joins the process group,
trains on its own images, and leaves the group. Training should end after the first step in which
the loss of the global batch is below the limit. All ranks have the same number of images, so this
loss is the mean of the ranks' losses. But some ranks end with an error, because they have lost the
connection. Find the fault, and repair train.

It is repaired if
- all ranks return the number of steps that they have taken, which is right with any number of
  ranks;
- the model is the same on all ranks, as if a single process had trained it with all images;
- each rank leaves the group.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_lost_connection.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def train(model, images, labels, limit):
    """Train on this rank's images, at most 20 steps. Returns the number of steps."""
    dist.init_process_group("gloo")
    steps = 0
    while steps < 20:
        steps += 1
        model.zero_grad()
        loss = F.mse_loss(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        if loss < limit:
            break
    dist.destroy_process_group()
    return steps


if __name__ == "__main__":
    check(__file__)
