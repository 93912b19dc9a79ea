"""A step that accumulates the gradients of two micro-batches.

To save messages, DDP should average only once in a step, after the last micro-batch.
What people saw: GPT-2 learns, but its loss is 4.88 after 1000 steps, where 4.15 is expected.
The report: https://github.com/karpathy/build-nanogpt/pull/30 (June 2024, repaired on that day).

Run it, in one process and in two:
    python playground/museum/accumulated.py
    step 12  loss 0.882693284292
    torchrun --standalone --nproc-per-node 2 playground/museum/accumulated.py
    step 12  loss 0.886861308942
"""

import torch
from hall import batch, images, labels, mine, show
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

model = DDP(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(12):
    optimizer.zero_grad()
    total = torch.zeros(())
    for micro_step, micro_batch in enumerate(batch(step).chunk(2)):
        rows = mine(micro_batch)
        logits = model(images[rows])
        loss = F.cross_entropy(logits, labels[rows]) / 2
        model.require_backward_grad_sync = micro_step == 1
        loss.backward()
        total += loss.detach()
    optimizer.step()
    show(step, total)
