"""How fault_mean_of_means is checked."""

from judging.single import named, seeded, step
from judging.texts import Bigram, mean_loss, micro_batches_of

NAME = "train"
FAULT = "WRONG with 1 rank, 3 micro-batches, 1 step ... about 1.2 times what is expected"
CASES = {
    "3 micro-batches, 1 step": {"steps": 1},
    "different numbers of micro-batches, 3 steps": {"steps": 3, "uneven": True},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
STARTS = True
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


def run(train, rank, world_size, steps, uneven=False):
    model = seeded(Bigram)
    train(model, part(rank, uneven), steps)
    return named(model)


def expected(rank, world_size, steps, uneven=False):
    model = seeded(Bigram)
    micro_batches = []
    for each in range(world_size):
        micro_batches += part(each, uneven)
    for _ in range(steps):
        step(model, mean_loss(model, micro_batches))
    return named(model)


REPAIR = (
    "    for _ in",
    "    count = sum((labels != -100).sum() for _, labels in micro_batches)\n"
    "    dist.all_reduce(count)  # the tokens of all ranks and of all micro-batches\n"
    "    for _ in",
    "            count = (labels != -100).sum()\n"
    "            dist.all_reduce(count)  # the tokens of all ranks\n",
    "",
    " / len(micro_batches)",
    "",
)
WHY = "every loss is divided by the same number, so every token counts the same."
COUNT = "    count = sum((labels != -100).sum() for _, labels in micro_batches)\n"
REDUCE = "    dist.all_reduce(count)  # the tokens of all ranks and of all micro-batches\n"
IN_LOOP = "            count = (labels != -100).sum()\n            dist.all_reduce(count)\n"
LOSS = "total / count"
WORDS = {
    "(HANG|CRASH), different": "In a loop over micro-batches, a rank with more of them than "
    "others makes more calls. Call collectives outside of it."
}
MISTAKES = {
    "WRONG with 1 rank, 3 micro-batches": (
        *(COUNT + REDUCE, ""),
        *("            total", f"{IN_LOOP}            total"),
    ),
    "It changes by about 1.9 times what is expected": (REDUCE, ""),
    "changes by 2 times": (LOSS, f"{LOSS} * dist.get_world_size()"),
    "expected, divided by 2": (LOSS, f"{LOSS} / dist.get_world_size()"),
    WORDS["(HANG|CRASH), different"]: ("total =", "dist.all_reduce(count.clone()); total ="),
}
