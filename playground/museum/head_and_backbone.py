"""A backbone and its head, each inside DDP.

Each rank has half of every batch, and all ranks should have the same model after every step.
What people saw: the loss goes down, on each rank. A checkpoint of rank 0 is worse than the loss.
The report: https://github.com/moojink/openvla-oft/issues/160 (July 2026, open two months later).

Run it, in one process and in two:
    python playground/museum/head_and_backbone.py
    step 12  loss 0.882693284292
    torchrun --standalone --nproc-per-node 2 playground/museum/head_and_backbone.py
    step 12  loss 0.884628860549
"""

import torch
from hall import batch, images, labels, mine, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

backbone = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh()))
head = DDP(nn.Linear(32, 4))
optimizer = torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.3)
for step in range(12):
    rows = mine(batch(step))
    features = backbone(images[rows])
    logits = head.module(features)
    loss = F.cross_entropy(logits, labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
