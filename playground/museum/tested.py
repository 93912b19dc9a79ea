"""A test after each step of training.

The loss that is printed is the mean over 29 test examples, which the ranks share.
What people saw: the accuracy changes a little with the number of GPUs and with the batch size.
The report: https://github.com/pytorch/pytorch/issues/25162 (August 2019, open; rf-detr#1507 of
September 2026 is the same).

Run it, in one process and in two:
    python playground/museum/tested.py
    step 12  loss 0.945750534996
    torchrun --standalone --nproc-per-node 2 playground/museum/tested.py
    step 12  loss 0.960951388336
"""

import torch
from hall import batch, images, labels, mine, rank, ranks, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
tests = TensorDataset(images[96:125], labels[96:125])
sampler = DistributedSampler(tests, ranks, rank, shuffle=False)
loader = DataLoader(tests, batch_size=8, sampler=sampler)
for step in range(12):
    rows = mine(batch(step, 16))  # of the first 96 examples, which are not in the test
    loss = F.cross_entropy(model(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total, count = torch.zeros(()), 0
    with torch.no_grad():
        for inputs, targets in loader:
            total += F.cross_entropy(model(inputs), targets, reduction="sum")
            count += len(inputs)
    show(step, total, count)
