"""Two split matrices and a layer that is whole, whose gradients are clipped.

As in `split_matrices.py`. The norm of all gradients together is clipped.
What people saw: nothing. The loss goes down, and the printed norm is a little larger.
The report: https://github.com/NVIDIA-NeMo/RL/pull/3788 (August 2026).

Run it, in one process and in two:
    python playground/museum/clipped_matrices.py
    step 12  loss 0.963282264093
    torchrun --standalone --nproc-per-node 2 playground/museum/clipped_matrices.py
    step 12  loss 0.967476651789
"""

import torch
import torch.distributed as dist
from hall import batch, images, labels, mine, show, summed
from torch import nn
from torch.nn import functional as F


class Split(nn.Module):
    """Two matrices, split between the ranks, and a LayerNorm, which each rank has whole."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32, bias=False)
        self.down = nn.Linear(32, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        self.up.weight = nn.Parameter(mine(self.up.weight.detach()).clone())
        self.down.weight = nn.Parameter(mine(self.down.weight.detach(), dim=1).clone())

    def forward(self, x):
        """Compute with this rank's half of the hidden units, and add up the ranks' results."""
        return self.norm(summed(self.down(self.up(x).tanh())))


def squares_of(parameters):
    """Return the sum of the squares of gradients."""
    return sum(parameter.grad.square().sum() for parameter in parameters)


model = Split()
split = [model.up.weight, model.down.weight]
whole = [model.norm.weight, model.norm.bias]
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(12):
    rows = batch(step)  # the same examples on all ranks
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    squares = squares_of([*split, *whole])
    dist.all_reduce(squares)
    for parameter in model.parameters():
        parameter.grad *= min(1.0, 0.2 / squares.sqrt().item())
    optimizer.step()
    show(step, loss)
