"""How fault_mean_of_means is checked."""

import torch
import torch.distributed as dist
from judging.single import named, seeded, step
from judging.texts import Bigram, mean_loss, micro_batches_of
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 1 rank, 3 micro-batches, 1 step ... This is a mean of means"
CASES = {
    "3 micro-batches, 1 step": {"steps": 1},
    "different numbers of micro-batches, 3 steps": {"steps": 3, "uneven": True},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
IMITATED = True
HINTS = """
One micro-batch has 2 tokens, and another one has 10. How much does a token of each of them count in
the loss of the step?

Divide all losses of the step by the same number: the tokens of all micro-batches of all ranks. It
must be known before the first backward(), so count before the loop, with one all_reduce. Then it is
no fault either if another rank has more micro-batches.

count = the tokens of all micro-batches of this rank, added up over the ranks
for each micro-batch: (the sum of its losses / count).backward()
"""


def part(rank, uneven=False):
    """Return the micro-batches of a rank: 3, or 1 to 3."""
    return micro_batches_of(rank, 1 + (rank + 1) % 3 if uneven else 3)


def run(train, steps, uneven=False):
    model = seeded(Bigram)
    train(model, part(dist.get_rank(), uneven), steps)
    return named(model)


def expected(rank, world_size, steps, uneven=False):
    model = seeded(Bigram)
    micro_batches = []
    for each in range(world_size):
        micro_batches += part(each, uneven)
    for _ in range(steps):
        step(model, mean_loss(model, micro_batches))
    return named(model)


def train(model, micro_batches, steps):
    """Why: every loss is divided by the same number, so every token counts the same."""
    count = sum((labels != -100).sum() for _, labels in micro_batches)
    dist.all_reduce(count)  # the tokens of all ranks and of all micro-batches
    for _ in range(steps):
        model.zero_grad()
        for rows, labels in micro_batches:
            total = F.cross_entropy(model(rows), labels, reduction="sum")
            loss = total / count
            loss.backward()  # adds to the gradients
        with torch.no_grad():
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)  # each rank has the part of its own tokens
                parameter -= 0.1 * parameter.grad


COUNT = "    count = sum((labels != -100).sum() for _, labels in micro_batches)\n"
REDUCE = "    dist.all_reduce(count)  # the tokens of all ranks and of all micro-batches\n"
IN_LOOP = "            count = (labels != -100).sum()\n            dist.all_reduce(count)\n"
TOTAL = "            total"
ADD = "        count += more\n"
LOSS = "total / count"
WORDS = {
    "(HANG|CRASH), different": "In a loop over micro-batches, a rank with more of them than "
    "others makes more calls. Call collectives outside of it."
}
MISTAKES = {
    "This is a mean of means: a token counts more in a micro-batch with few tokens than in one "
    "with many.": (
        *(COUNT + REDUCE, ""),
        *(TOTAL, f"{IN_LOOP}{TOTAL}"),
        *(LOSS, f"{LOSS} / len(micro_batches)"),
    ),
    "`count` has the tokens of all micro-batches already, so the loss need not be divided by their "
    "number.": (LOSS, f"{LOSS} / len(micro_batches)"),
    "This is the sum of the micro-batches' means.": (
        *(COUNT + REDUCE, ""),
        *(TOTAL, f"{IN_LOOP}{TOTAL}"),
    ),
    "Each rank divides by the number of its own tokens.": (REDUCE, ""),
    "Each rank divides by the number of its own tokens, and by the number of ranks.": (
        *(REDUCE, "    count = count * dist.get_world_size()\n"),
    ),
    "Nothing divides by the number of ranks here, because all_reduce only adds up. DDP would.": (
        *(LOSS, f"{LOSS} * dist.get_world_size()"),
    ),
    "Padding is counted, too.": ("(labels != -100).sum()", "torch.tensor(labels.numel())"),
    "This is the right gradient, divided by the number of ranks.": (
        *(LOSS, f"{LOSS} / dist.get_world_size()"),
    ),
    WORDS["(HANG|CRASH), different"]: (
        *(COUNT, "    count = 0\n    for _, labels in micro_batches:\n"),
        *(REDUCE, f"{IN_LOOP.replace('count', 'more').replace('    ' * 3, '    ' * 2)}{ADD}"),
    ),
}
