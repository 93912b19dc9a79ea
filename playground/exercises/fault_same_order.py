"""Find the fault: every epoch has the same order.

Lesson: distributed_data_parallel.py.

`train(model, dataset, epochs)` trains one model on all ranks. Each rank reads its own part of the
images, and the ranks average their gradients in each step. In each epoch, the images should come in
a new order. But every epoch has the same order. Find the fault, and repair train.

It is repaired if
- no two epochs have the same order;
- in each epoch the images are distributed anew, so a rank does not keep the same images;
- in each epoch each image is read once, on one rank. If the number of images is not a multiple of
  the number of ranks, the epoch leaves out the remainder;
- the model is still trained as a single process would train it, on the images of all ranks in each
  step.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_same_order.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler


def train(model, dataset, epochs):
    """Train. All ranks have the same model, without frozen parameters, and the same data set."""
    sampler = DistributedSampler(dataset, seed=0, drop_last=True)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler)
    for _ in range(epochs):
        for images, labels in loader:
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
