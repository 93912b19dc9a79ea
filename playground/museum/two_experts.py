"""Two experts, which have the two halves of each batch (expert parallelism).

Each rank has one expert, and a replica of the shared layer. The norm of all gradients together is
clipped.
What people saw: nothing. Each rank prints a norm that looks right.
The report: https://github.com/NVIDIA-NeMo/Automodel/issues/3816 (September 2026).

Run it, in one process and in two:
    python playground/museum/two_experts.py
    step 12  loss 1.070668620516
    torchrun --standalone --nproc-per-node 2 playground/museum/two_experts.py
    step 12  loss 1.015574772536
"""

import torch
import torch.distributed as dist
from hall import batch, images, labels, mine, show
from torch import nn
from torch.nn import functional as F

shared = nn.Linear(16, 32)
experts = nn.ModuleList(nn.Linear(32, 4) for _ in range(2))
own = mine(torch.arange(2)).tolist()  # the experts of this rank: one of two, or both
parameters = [*shared.parameters(), *experts[own[0] : own[-1] + 1].parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.5)
for step in range(12):
    loss = torch.zeros(())
    for number in own:  # expert 0 has the first half of the batch, expert 1 the second one
        rows = batch(step).chunk(2)[number]
        logits = experts[number](shared(images[rows]).tanh())
        loss = loss + F.cross_entropy(logits, labels[rows]) / 2
    optimizer.zero_grad()
    loss.backward()
    for parameter in shared.parameters():
        dist.all_reduce(parameter.grad)
    of_shared = sum(parameter.grad.square().sum() for parameter in shared.parameters())
    of_experts = sum(parameter.grad.square().sum() for parameter in parameters[2:])
    norm = (of_shared + of_experts).sqrt()
    for parameter in parameters:
        parameter.grad *= min(1.0, 0.3 / norm.item())
    optimizer.step()
    show(step, loss, 1 / 2 * len(own))
