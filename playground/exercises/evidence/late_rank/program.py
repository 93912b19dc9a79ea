"""Trains a model. Some images have no label, so the loss is divided by the number of labels."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

NO_LABEL = -1


def read(rank, step):
    """Return the batch of a rank in a step: 8 images, and their labels."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    images = torch.randn(8, 6, generator=generator)
    labels = torch.randint(NO_LABEL, 2, (8,), generator=generator)
    return images, labels


def train(rank, world_size):
    """Train for 15 steps."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    start = time.perf_counter()
    for step in range(1, 16):
        images, labels = read(rank, step)
        count = (labels != NO_LABEL).sum()
        dist.all_reduce(count)
        logits = model(images)
        loss = F.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="sum") / count
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        if rank == 0 and step % 5 == 0:
            seconds = (time.perf_counter() - start) / step
            print(f"step {step}: {1000 * seconds:.0f} ms for each step", flush=True)
