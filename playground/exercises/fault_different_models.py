"""Find the fault: the ranks average their gradients, but their models differ.

Lesson: manual_data_parallel.py.

`train(make_model, images, seed)` trains a model to remove noise. In each step a rank adds noise to
its own images, and the ranks average their gradients. Each rank should add noise of its own, and
all ranks should have the same model. But their models differ. Find the fault, and repair train.

It is repaired if
- in each step all ranks have the same parameters and buffers, from the first step on;
- no two ranks add the same noise, and no two steps have the same noise;
- two runs with the same seed give the same model, and another seed gives a different one. The ranks
  may have drawn random numbers before they call train.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_different_models.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def train(make_model, images, seed):
    """Return a trained model. make_model() makes it, with random parameters and buffers."""
    # Each rank needs noise of its own.
    torch.manual_seed(seed + dist.get_rank())
    model = make_model()
    for _ in range(3):
        noise = 0.1 * torch.randn(images.shape)
        model.zero_grad()
        F.mse_loss(model(images + noise), images).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return model


if __name__ == "__main__":
    check(__file__)
