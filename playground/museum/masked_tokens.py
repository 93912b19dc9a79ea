"""Texts that are split between the ranks, of which some tokens do not count.

The loss is the mean over the tokens that count, on all ranks. So the gradients are added up.
What people saw: nothing. In this program, the loss goes down faster.
The report: https://github.com/verl-project/verl/issues/5983 (April 2026; the line was five months
old).

Run it, in one process and in two:
    python playground/museum/masked_tokens.py
    step 12  loss 3.237805693409
    torchrun --standalone --nproc-per-node 2 playground/museum/masked_tokens.py
    step 12  loss 3.041983519927
"""

import torch
import torch.distributed as dist
from hall import batch, mine, rank, ranks, show, texts
from torch import nn
from torch.nn import functional as F

# The ranks split each text (context parallelism). No two ranks have different texts.
context_parallel = dist.new_group(range(ranks))
data_parallel = [dist.new_group([each]) for each in range(ranks)][rank]

mask = torch.rand(96, 16) < 0.8  # the tokens that count
layers = nn.Embedding(32, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 32)
model = nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
for step in range(12):
    rows = batch(step, size=16)
    logits = model(mine(texts[rows, :-1], dim=1)).flatten(0, 1)
    targets = mine(texts[rows, 1:], dim=1).flatten()
    kept = mine(mask[rows], dim=1).flatten()
    losses = F.cross_entropy(logits, targets, reduction="none") * kept
    tokens = kept.sum().double()
    dist.all_reduce(tokens, group=data_parallel)
    loss = losses.sum() / tokens
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=context_parallel)  # a sum over the tokens
    optimizer.step()
    show(step, losses.sum(), kept.sum())
