"""A model with dropout, written by hand.

Each example should lose other numbers. (There are several cures. With one of them, two processes
print the digits of one.)
What people saw: with several GPUs, the model is much worse than with one.
The report: https://github.com/huggingface/transformers/issues/31412 (June 2024).

Run it, in one process and in two:
    python playground/museum/dropout.py
    step 12  loss 0.893718497427
    torchrun --standalone --nproc-per-node 2 playground/museum/dropout.py
    step 12  loss 0.948624832048
"""

import torch
from hall import batch, images, labels, mine, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Dropout(nn.Module):
    """Sets a fifth of the numbers to 0, and makes the others larger, so that the sum stays."""

    def forward(self, x):
        """Draw a number for each number of x."""
        drawn = torch.rand(x.shape)
        return x * (drawn > 0.2) / 0.8


model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), Dropout(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(12):
    rows = mine(batch(step))
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
