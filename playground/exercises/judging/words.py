"""Puts into words what is wrong, what hangs, and what costs too much."""

import itertools
import math

import torch

from watching.facts import facts

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


def why_it_hangs(trial):
    """Return words for a hang: which message is missing. None if it is not known."""
    calls = [mine[-1].call if mine else None for mine in trial.messages]
    if all(call == "send" for call in calls):
        return "Every rank waits in send until its message is received. Which rank receives?"
    sent, missing = trial.steps
    for rank, recv in missing:
        if recv.peer is not None:
            return f"Rank {rank} waits for a message that rank {recv.peer} has not sent."
    for each in sent:
        if not each.received:
            return f"Rank {each.receiver} has not received a message from rank {each.sender}."
    if sent:
        return "Each message has a sender and a receiver. Is wait() called for each request?"
    first = [each.call for each in trial.messages[0]]
    for mine in trial.messages:
        if [each.call for each in mine] != first:
            return "All ranks must call the same collectives in the same order."
    return None


def lost_message(trial):
    """Return words if a message was not received, or a recv has got none; otherwise None."""
    sent, missing = trial.steps
    for each in sent:
        if not each.received:
            return f"rank {each.receiver} has not received a message from rank {each.sender}"
    for rank, recv in missing:
        origin = f", from rank {recv.peer}" if recv.peer is not None else ""
        return f"rank {rank} expects one more message{origin}"
    return None


def sent_with_gaps(trial):
    """Return words on a tensor of which gloo has sent other numbers; None if there is none."""
    for rank, mine in enumerate(trial.messages):
        for each in mine:
            if each.with_gaps and each.kind in ("broadcast", "reduce", "all_reduce", "scatter"):
                lies = "has a tensor that is not contiguous, and gloo sends its memory as it lies"
                return f"Rank {rank}'s {each.call} {lies}. Send .contiguous()."
    return None


def used(trial, rank):
    """Return what a rank has sent."""
    calls = [each for each in trial.messages[rank] if each.kind != "recv"]
    sent, _ = trial.steps
    return {
        "rounds": max((each.step for each in sent), default=0),
        "bytes": sum(each.nbytes for each in calls),
        "messages": len(calls),
    }


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
