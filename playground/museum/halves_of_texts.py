"""Texts that are split between the ranks (sequence parallelism).

Each rank has half of the tokens of each text. Each token is computed by itself, so no rank needs
the other half.
What people saw: nothing. There is no error, and no shape that does not fit.
The report: https://github.com/ByteDance-Seed/VeOmni/issues/1059 (August 2026, repaired in a week).

Run it, in one process and in two:
    python playground/museum/halves_of_texts.py
    step 12  loss 3.103945208063
    torchrun --standalone --nproc-per-node 2 playground/museum/halves_of_texts.py
    step 12  loss 3.094692675132
"""

import torch
import torch.distributed as dist
from hall import batch, mine, rank, ranks, show, texts
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# The ranks split each text, so they are one group of sequence parallelism, and the groups of data
# parallelism, in which ranks have different texts, have one rank each.
sequence_parallel = dist.new_group(range(ranks))
data_parallel = [dist.new_group([each]) for each in range(ranks)][rank]

layers = nn.Embedding(32, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 32)
model = DDP(nn.Sequential(*layers), process_group=data_parallel)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(12):
    rows = texts[batch(step, size=16)]
    inputs = mine(rows[:, :-1], dim=1)
    targets = mine(rows[:, 1:], dim=1)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    show(step, loss)
