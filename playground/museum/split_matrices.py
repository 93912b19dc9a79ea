"""Two layers whose matrices are split between the ranks (tensor parallelism).

Each rank computes half of the hidden units, for all examples.
What people saw: the loss goes down. With weights from elsewhere, the outputs are wrong.
The report: https://github.com/Wenyueh/MinivLLM/issues/80 (June 2026; #13 had named it in January,
PaddlePaddle/Paddle/pull/35186 in 2021).

Run it, in one process and in two:
    python playground/museum/split_matrices.py
    step 12  loss 0.882693284292
    torchrun --standalone --nproc-per-node 2 playground/museum/split_matrices.py
    step 12  loss 0.884133800553
"""

import torch
from hall import batch, images, labels, mine, show, summed
from torch import nn
from torch.nn import functional as F


class Split(nn.Module):
    """Two layers. The first matrix is split by rows, the second one by columns."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 4)
        self.up.weight = nn.Parameter(mine(self.up.weight.detach()).clone())
        self.up.bias = nn.Parameter(mine(self.up.bias.detach()).clone())
        self.down.weight = nn.Parameter(mine(self.down.weight.detach(), dim=1).clone())

    def forward(self, x):
        """Compute with this rank's half of the hidden units, and add up the ranks' results."""
        hidden = self.up(x).tanh()
        return summed(self.down(hidden))


model = Split()
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(12):
    rows = batch(step)  # the same examples on all ranks
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
