"""Find the fault: the experts of all ranks change by the same numbers.

Lesson: transformer/expert_parallel.py.

`train(model, tokens, goals, steps)` trains a mixture of experts. Each rank has the same number of
tokens. `model.shared` is a layer of which each rank has a replica, and `model.experts` are those of
this rank. Tokens travel to their experts and back inside the model, forward and backward. After
training, the replicas should be equal, and each parameter should be what a single process gets that
has all experts and all tokens. But the experts change by wrong numbers. Find the fault, and repair
train.

It is repaired if
- the replicas and the experts are those of a single process.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_averaged_experts.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def train(model, tokens, goals, steps):
    """Train on this rank's tokens. Each parameter gets a gradient on all ranks."""
    for _ in range(steps):
        model.zero_grad()
        F.mse_loss(model(tokens), goals).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad


if __name__ == "__main__":
    check(__file__)
