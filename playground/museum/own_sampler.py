"""A sampler that knows the ranks, and a library that does, too.

In each epoch, each example should be read once, by one of the ranks.
What people saw: an epoch has fewer steps than they thought (here 3, and not 6). The loss goes down.
The report: https://github.com/huggingface/accelerate/issues/3520 (April 2025; #4199 of September
2026 is the same).

Run it, in one process and in two:
    python playground/museum/own_sampler.py
    step 12  loss 0.844411932223
    torchrun --standalone --nproc-per-node 2 playground/museum/own_sampler.py
    step 12  loss 0.747642764291
"""

import torch
from hall import images, labels, rank, ranks, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def prepare(dataset, sampler):
    """Return a loader for this rank, as libraries for training have such a function."""
    places = [*sampler][rank::ranks]
    return DataLoader(dataset, batch_size=32 // ranks, sampler=places)


data = TensorDataset(images, labels)
sampler = DistributedSampler(data, ranks, rank, seed=7)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
step = epoch = 0
while step < 12:
    sampler.set_epoch(epoch)
    for inputs, targets in prepare(data, sampler):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(step, loss)
        step += 1
    epoch += 1
