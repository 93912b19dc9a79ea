"""Inputs that a running mean and a running variance standardize.

The two statistics are not trained. They should be those of all examples that were read.
What people saw: in a game, two GPUs get a reward of 86.9, where one gets 94.8.
The report: https://github.com/Denys88/rl_games/pull/363 (August 2026, in the month in which
leggedrobotics/rsl_rl/pull/226 mends the same).

Run it, in one process and in two:
    python playground/museum/standardized.py
    step 12  loss 0.805250693742
    torchrun --standalone --nproc-per-node 2 playground/museum/standardized.py
    step 12  loss 0.804579624309
"""

import torch
from hall import batch, images, labels, mine, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Standardize(nn.Module):
    """Subtracts a running mean, and divides by the root of a running variance."""

    def __init__(self, features):
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("square", torch.ones(features))

    def forward(self, x):
        """Update the two statistics with a batch, and standardize it."""
        batch_mean = torch.stack([x.mean(dim=0), x.square().mean(dim=0)])
        self.mean.lerp_(batch_mean[0], 0.1)
        self.square.lerp_(batch_mean[1], 0.1)
        return (x - self.mean) / (self.square - self.mean.square()).sqrt()


trained = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
model = nn.Sequential(Standardize(16), trained)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(12):
    rows = mine(batch(step))
    loss = F.cross_entropy(model(3 * images[rows] + 1), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
