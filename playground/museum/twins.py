"""A loss that compares two views of each example (as Barlow Twins).

The outputs for both views should be correlated, and their features should not. The correlations are
means over all ranks.
What people saw: the loss is right in each step, but it goes down more slowly. PyTorch warns.
The report: https://github.com/lightly-ai/lightly/issues/1977 (July 2026).

Run it, in one process and in two:
    python playground/museum/twins.py
    step 12  loss 5.508550461109
    torchrun --standalone --nproc-per-node 2 playground/museum/twins.py
    step 12  loss 6.473803824544
"""

import torch
import torch.distributed as dist
from hall import batch, images, mine, ranks, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def correlation(first, second):
    """Return the correlations of the outputs for both views, as means over all examples."""
    matrix = first.T @ second / len(first) / ranks
    dist.all_reduce(matrix)
    return matrix


model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(12):
    rows = mine(batch(step))
    views = torch.cat([images[rows], images[rows].roll(1, dims=1)])
    first, second = model(views).chunk(2)
    loss = (correlation(first, second) - torch.eye(8)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
