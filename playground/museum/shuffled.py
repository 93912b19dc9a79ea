"""Examples in a new order in each epoch.

In each epoch, each example should be read once, by one of the ranks.
What people saw: nothing. The loss goes down as well as before.
The report: https://github.com/NVlabs/LongLive/issues/71 (July 2026, repaired in three days).

Run it, in one process and in two:
    python playground/museum/shuffled.py
    step 12  loss 0.844411932223
    torchrun --standalone --nproc-per-node 2 playground/museum/shuffled.py
    step 12  loss 0.886520808297
"""

import torch
from hall import images, labels, rank, ranks, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

seed = 7 + rank  # for augmentations, which differ on each rank
data = TensorDataset(images, labels)
sampler = DistributedSampler(data, ranks, rank, shuffle=True, seed=seed)
loader = DataLoader(data, batch_size=32 // ranks, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for number, (inputs, targets) in enumerate(loader):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        show(6 * epoch + number, loss)
