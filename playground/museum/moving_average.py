"""A moving average of the parameters, from which training continues now and then.

The average is the better model, so every fourth step ends by copying it into the model.
What people saw: nothing. The loss goes down, and rank 0 saves its average.
The report: https://github.com/lucidrains/ema-pytorch/issues/9 (a question of April 2023; the doubts
are of December 2024).

Run it, in one process and in two:
    python playground/museum/moving_average.py
    step 12  loss 1.142449334181
    torchrun --standalone --nproc-per-node 2 playground/museum/moving_average.py
    step 12  loss 0.997029047572
"""

import torch
from hall import batch, images, labels, mine, rank, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
average = [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def update_average(step):
    """Update the average. After every fourth step, training continues from the average."""
    for kept, parameter in zip(average, model.parameters(), strict=True):
        kept.lerp_(parameter, 0.1)
        if step % 4 == 3:
            parameter.copy_(kept)


for step in range(12):
    rows = mine(batch(step))
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0:
        update_average(step)
    show(step, loss)
