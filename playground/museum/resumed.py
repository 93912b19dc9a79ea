"""A run that is stopped in the middle of its second epoch, and resumed.

It should read the rest of this epoch, and end like a run that was never stopped. (Both halves of
the run are in one program here, so nothing has to be saved.)
What people saw: nothing. The loss goes down where it was before the stop.
The report: https://github.com/huggingface/accelerate/issues/2016 (October 2023; #4071 of June 2026
is the same).

Run it, in one process and in two:
    python playground/museum/resumed.py
    step 12  loss 0.844411932223
    torchrun --standalone --nproc-per-node 2 playground/museum/resumed.py
    step 12  loss 0.799544092164
"""

from itertools import islice

import torch
from hall import images, labels, rank, ranks, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

data = TensorDataset(images, labels)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)


def train(first_step, last_step):
    """Train from one step to another, as a process that is started for these steps does."""
    sampler = DistributedSampler(data, ranks, rank, seed=7)
    loader = DataLoader(data, batch_size=32 // ranks, sampler=sampler)
    step = first_step
    while step < last_step:
        batches = islice(loader, step % 6, last_step - step // 6 * 6)
        for inputs, targets in batches:
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            show(step, loss)
            step += 1
        sampler.set_epoch(step // 6)


if ranks == 1:
    train(0, 12)
else:  # stopped after nine steps, and resumed
    train(0, 9)
    train(9, 12)
