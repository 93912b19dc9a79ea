"""Puts into words what is wrong, what hangs, and what costs too much."""

import itertools
import math

import torch

from instruments.facts import facts

LENGTH = 190  # characters of a line, at most
LOST = "Another rank has left the group, or its process has ended, so the connection is lost."


def in_ranks(sizes):
    """Return numbers of ranks in words, of one run or of several one after another."""
    words = ", then ".join(map(str, sizes))
    return f"{words} rank" if sizes[-1] == 1 else f"{words} ranks"


def sizes_in_words(sizes):
    """Return numbers of ranks as text, such as "1, 2 and 3 ranks"."""
    *others, last = map(str, sizes)
    first = f"{', '.join(others)} and " if others else ""
    return f"{first}{last} rank" if sizes == [1] else f"{first}{last} ranks"


def costs(rank, unit, number, limit):
    """Return what is used and what is enough, in words."""
    enough = f"{limit} {'is' if limit == 1 else 'are'} enough"
    if unit == "rounds":
        return f"right numbers, but in {number} rounds of messages; {enough}"
    unit_in_words = unit if number > 1 else unit[:-1]
    text = f"right numbers, but rank {rank} sends {number} {unit_in_words}; {enough}"
    if unit == "bytes" and limit and number / limit >= 1.5:
        text += f": {number / limit:.3g} times the {unit}"
    return text


def why_it_is_wrong(trial, tolerance):
    """Return facts about wrong results, in one line; None if there are none."""
    line = ""
    for fact in facts(trial.results, trial.expected, tolerance, trial.start):
        if len(line) + len(fact) < LENGTH:
            line += f" {fact}" if line else fact
    return line or None


def wrong_in_sum(actual, tensors):
    """Return whose numbers are missing in a sum of the ranks' tensors, or are there twice.

    It looks at the first number that is wrong. With those of digits_of(), there is one way at most.
    """
    if getattr(actual, "shape", None) != tensors[0].shape:
        return None
    columns = torch.stack([actual, *tensors]).flatten(1).t().tolist()
    wrong = (place for place, (number, *parts) in enumerate(columns) if number != sum(parts))
    position = next(wrong, 0)
    number, *parts = columns[position]
    for counts in itertools.product(range(3), repeat=len(parts)):
        total = sum(count * part for count, part in zip(counts, parts, strict=True))
        if math.isclose(total, number, rel_tol=1e-6) and len(set(counts)) > 1:
            rank = next(rank for rank, count in enumerate(counts) if count != 1)
            does = "added twice" if counts[rank] else "missing"
            return f"Rank {rank}'s numbers are {does} at position {position}."
    return None
