"""How order_1f1b is checked."""

from itertools import zip_longest

WORLD_SIZES = (1, 2, 3, 4, 5, 8)  # with 8 ranks, the warm-up of rank 0 has 7 forward passes
CASES = {
    "3 micro-batches": {"micro_batches": 3, "most": 8},
    "8 micro-batches": {"micro_batches": 8, "most": 8},
    "1 micro-batch": {"micro_batches": 1, "most": 8},
    "8 micro-batches, 2 at most": {"micro_batches": 8, "most": 2},
    "5 micro-batches, 3 at most": {"micro_batches": 5, "most": 3},
    "4 micro-batches, 1 at most": {"micro_batches": 4, "most": 1},
}
RUNG_1 = "for the lesson's 1F1B"
RUNG_2 = "memory for `most` micro-batches only."
CASES_OF_RUNG_1 = 3
HINTS = """
First come forward passes only, then a backward and a forward pass in turn, and then the backward
passes that are left. How many forward passes come first?

one_forward_one_backward in manual_pipeline.py returns the same order for a rank that has memory for
all that it wants to keep. Which line decides how much it keeps?

kept = the smallest of: the number of ranks from this one on, most, micro_batches
F0 to F(kept - 1)
for each micro-batch: its B, and the next F if there is one left
"""


def run(order_1f1b, rank, world_size, micro_batches, most):
    order = order_1f1b(rank, world_size, micro_batches, most)
    is_list = isinstance(order, list) and all(isinstance(each, str) for each in order)
    return " ".join(order) if is_list else [order]


def expected(rank, world_size, micro_batches, most):
    """Return the only right order: the activations that are kept decide what is next."""
    limit = min(world_size - rank, most)
    order = []
    forward = 0
    backward = 0
    while backward < micro_batches:
        if forward < micro_batches and forward - backward < limit:
            order.append(f"F{forward}")
            forward += 1
        else:
            order.append(f"B{backward}")
            backward += 1
    return " ".join(order)


def order_1f1b(rank, world_size, micro_batches, most):
    """Why: a rank has time for one forward pass for each rank from it on, if memory allows."""
    kept = min(world_size - rank, most, micro_batches)
    order = [f"F{number}" for number in range(kept)]
    for number in range(micro_batches):
        order.append(f"B{number}")
        if kept + number < micro_batches:
            order.append(f"F{kept + number}")
    return order


def explain(verdict):
    actual, right = verdict.found[verdict.rank], verdict.expected[verdict.rank]
    if not isinstance(actual, str):
        return 'Return a list of strings, such as ["F0", "B0"].'
    passes = zip_longest(actual.split(), right.split(), fillvalue="missing")
    for number, (found, needed) in enumerate(passes, start=1):
        if found != needed:
            return f"Pass {number} of rank {verdict.rank} is {found}, not {needed}."


KEPT = "min(world_size - rank, most, micro_batches)"
MISTAKES = {
    "Pass 3 of rank 0 is F2, not B0.": (KEPT, "micro_batches"),
    "Pass 2 of rank 0 is F1, not B0.": ("rank, most,", "rank,"),
    "WRONG with 2 ranks, 1 micro-batch": (KEPT, "min(world_size - rank, most)"),
}
