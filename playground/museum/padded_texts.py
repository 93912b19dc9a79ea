"""Texts of unequal lengths.

What is behind a text's end does not count. The loss is the mean over all tokens that do.
What people saw: nothing. The loss that is printed is right in each step.
The report: https://github.com/ml-explore/mlx-lm/pull/1413 (June 2026; many trainers had it until
October 2024, as huggingface/transformers/pull/34373).

Run it, in one process and in two:
    python playground/museum/padded_texts.py
    step 12  loss 3.032709953543
    torchrun --standalone --nproc-per-node 2 playground/museum/padded_texts.py
    step 12  loss 3.031226382200
"""

import torch
from hall import batch, mine, show, texts
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

lengths = torch.randint(2, 17, (96,))  # of the texts; what follows is padding
layers = nn.Embedding(32, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 32)
model = DDP(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(12):
    rows = mine(batch(step, size=16))
    logits = model(texts[rows, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), texts[rows, 1:].flatten(), reduction="none")
    kept = (torch.arange(16) < lengths[rows, None]).flatten()
    tokens = kept.sum().double()
    loss = (losses * kept).sum() / tokens
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, (losses * kept).sum(), kept.sum())
