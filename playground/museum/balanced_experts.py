"""A mixture of experts, and a second loss that keeps their work balanced.

The second loss is computed from the global batch. Its weight, 0.1, should not depend on the number
of ranks.
What people saw: the more ranks, the less balanced are the experts.
The report: https://github.com/NVIDIA/Megatron-LM/issues/3672 (March 2026).

Run it, in one process and in two:
    python playground/museum/balanced_experts.py
    step 12  loss 1.279294298480
    torchrun --standalone --nproc-per-node 2 playground/museum/balanced_experts.py
    step 12  loss 1.293077220012
"""

import torch
import torch.distributed as dist
from hall import batch, images, labels, mine, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Mixture(nn.Module):
    """A router chooses one of four experts for each example."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.Linear(16, 4 * 4)

    def forward(self, x):
        """Return the logits, and a second loss: it is smallest if all experts get equally many."""
        scores = self.router(x).softmax(dim=1)
        chosen = scores.argmax(dim=1)
        outputs = self.experts(x).unflatten(1, (4, 4))[torch.arange(len(x)), chosen]
        counts = chosen.bincount(minlength=4).double()
        dist.all_reduce(counts)  # of the global batch
        balance = 4 * (counts / counts.sum() * scores.sum(dim=0) / counts.sum()).sum()
        return outputs * scores.gather(1, chosen[:, None]), balance


model = DDP(Mixture())
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(12):
    rows = mine(batch(step))
    logits, balance = model(images[rows])
    loss = F.cross_entropy(logits, labels[rows])
    optimizer.zero_grad()
    (loss + 0.1 * balance).backward()
    optimizer.step()
    show(step, loss)
