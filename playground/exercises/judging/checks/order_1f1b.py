"""How order_1f1b is checked."""

import os
from collections import Counter

from judging.attempt import Rung

JOIN = False  # so the function can use nothing but its arguments
WORLD_SIZES = (1, 2, 3, 4, 5, 8)  # with 8 ranks, the warm-up of rank 0 has 7 forward passes
CASES = {
    "3 micro-batches": {"micro_batches": 3, "most": 8},
    "8 micro-batches": {"micro_batches": 8, "most": 8},
    "1 micro-batch": {"micro_batches": 1, "most": 8},
    "8 micro-batches, 2 at most": {"micro_batches": 8, "most": 2},
    "5 micro-batches, 3 at most": {"micro_batches": 5, "most": 3},
    "4 micro-batches, 1 at most": {"micro_batches": 4, "most": 1},
}
RUNG_1 = Rung(
    cases=("3 micro-batches", "8 micro-batches", "1 micro-batch"),
    words="for the lesson's 1F1B",
    then="memory for `most` micro-batches only.",
)
HINTS = """
First come forward passes only, then a backward and a forward pass in turn, and then the backward
passes that are left. How many forward passes come first?

one_forward_one_backward in manual_pipeline.py returns the same order for a rank that has memory for
all that it wants to keep. Which line decides how much it keeps?

kept = the smallest of: the number of ranks from this one on, most, micro_batches
F0 to F(kept - 1)
for each micro-batch: its B, and the next F if there is one left
"""


def run(order_1f1b, micro_batches, most):
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
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


def explain(trial):
    """Return what is wrong with an order by itself, without the other ranks."""
    actual, right = trial.of_rank()
    if not isinstance(actual, str):
        return 'Return a list of strings, such as ["F0", "B0"].'
    order, right = actual.split(), right.split()
    count = Counter(order)
    for each in [*order, *right]:
        if each not in right:
            return f"There is no {each} here: the micro-batches are 0 to {len(right) // 2 - 1}."
        if count[each] != 1:
            return f"{each} is {'missing' if count[each] == 0 else f'there {count[each]} times'}."
    for number in range(len(right) // 2):
        if order.index(f"B{number}") < order.index(f"F{number}"):
            return f"B{number} comes before F{number}."
    first, least = order.index("B0"), right.index("B0")
    if first == least:
        return None
    return f"B0 is pass {first + 1} of rank {trial.rank}, not pass {least + 1}."


KEPT = "min(world_size - rank, most, micro_batches)"
MISTAKES = {
    "B0 is pass 4 of rank 0, not pass 3.": (KEPT, "micro_batches"),
    "B0 is pass 3 of rank 0, not pass 2.": ("rank, most,", "rank,"),
    "B0 is pass 2 of rank 0, not pass 3.": (KEPT, "1"),
    "There is no F1 here: the micro-batches are 0 to 0.": (KEPT, "min(world_size - rank, most)"),
}
