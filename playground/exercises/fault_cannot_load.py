"""Find the fault: a single process cannot load the checkpoint.

Lesson: distributed_data_parallel.py.

`train(model, images, labels, path)` trains a model on all ranks, and rank 0 writes a checkpoint.
Another program should read it in a single process, with a model of the same class:

    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])

But the model refuses the state. Find the fault, and repair train.

It is repaired if
- these two lines load the trained parameters, and the buffers too, for any model;
- the file is there when train returns, on every rank.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_cannot_load.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def train(model, images, labels, path):
    """Train on this rank's images, and write the checkpoint."""
    model = DistributedDataParallel(model)
    for _ in range(2):
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    if dist.get_rank() == 0:
        state = {"model": model.state_dict()}
        torch.save(state, path)
    dist.barrier()  # no rank returns before the file is there


if __name__ == "__main__":
    check(__file__)
