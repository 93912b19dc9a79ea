"""Compares results, and puts into words what differs, what hangs, and what costs too much."""

import itertools
import math

import torch

from judging.traffic import steps

SHOWN = 8  # numbers of a tensor that are shown
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # unless a check has another
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
    sent, missing = steps(trial.messages)
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
    sent, missing = steps(trial.messages)
    for each in sent:
        if not each.received:
            return f"rank {each.receiver} has not received a message from rank {each.sender}"
    for rank, recv in missing:
        origin = f", from rank {recv.peer}" if recv.peer is not None else ""
        return f"rank {rank} expects one more message{origin}"
    return None


def used(trial, rank):
    """Return what a rank has sent."""
    calls = [each for each in trial.messages[rank] if each.kind != "recv"]
    sent, _ = steps(trial.messages)
    return {
        "rounds": max((each.step for each in sent), default=0),
        "bytes": sum(each.nbytes for each in calls),
        "messages": len(calls),
    }


def costs(rank, unit, number, limit, world_size):
    """Return what is used and what is enough, in words."""
    enough = f"{limit} {'is' if limit == 1 else 'are'} enough"
    if unit == "rounds":
        return f"right numbers, but in {number} rounds of messages; {enough}"
    does = "sends" if world_size > 1 else "makes the calls of"  # alone, it sends nothing
    unit_in_words = unit if number > 1 else unit[:-1]
    text = f"right numbers, but rank {rank} {does} {number} {unit_in_words}; {enough}"
    if unit == "bytes" and limit and number / limit >= 1.5:
        text += f": {number / limit:.3g} times the {unit}"
    return text


def difference(actual, expected, tolerance=TOLERANCE):
    """Return the first difference of a result from what is expected, or None.

    Tensors need the same shape and dtype. Lists and dicts are compared entry by entry.

    Returns:
        three texts: the place in the result (empty: all of it), what is there, what is expected.
    """
    if isinstance(expected, torch.Tensor):
        return difference_of_tensors(actual, expected, tolerance)
    pairs = entries(actual, expected)
    if pairs is None:
        if isinstance(expected, (list, tuple, dict)) or not close(actual, expected, tolerance):
            return "", in_words(actual), in_words(expected)
        return None
    for name, left, right in pairs:
        found = difference(left, right, tolerance)
        if found:
            place, left_text, right_text = found
            return (f"{name}, {place}" if place else name), left_text, right_text
    return None


def entries(actual, expected):
    """Return (name, actual, expected) of each entry of a list or dict; None: they do not fit."""
    if isinstance(expected, (list, tuple)):
        if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
            return None
        names = [f"entry {number}" for number in range(len(expected))]
        return list(zip(names, actual, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(actual, dict) or actual.keys() != expected.keys():
            return None
        return [(str(key), actual[key], expected[key]) for key in expected]
    return None


def close(actual, expected, tolerance):
    """Return whether two values that are no tensors are equal; floats may differ a little."""
    if isinstance(expected, float) and isinstance(actual, (int, float)):
        relative, absolute = tolerance["rtol"], tolerance["atol"]
        return math.isclose(actual, expected, rel_tol=relative, abs_tol=absolute)
    if isinstance(actual, torch.Tensor) and actual.numel() != 1:
        return False
    return bool(actual == expected)


def difference_of_tensors(actual, expected, tolerance):
    """Return the difference of two tensors as three texts, or None. See difference."""
    shape = f"a tensor of shape {tuple(expected.shape)}"
    if not isinstance(actual, torch.Tensor):
        return "", in_words(actual), shape
    if actual.shape != expected.shape:
        return "", f"a tensor of shape {tuple(actual.shape)}", shape
    if actual.dtype != expected.dtype:
        return "", f"numbers of {actual.dtype}", f"numbers of {expected.dtype}"
    same = torch.isclose(actual, expected, equal_nan=True, **tolerance).flatten()
    if same.all():
        return None
    first = same.int().argmin().item()
    start = 0 if first < SHOWN else first
    place = f"from position {start}" if start else ""
    return place, numbers(actual, start), numbers(expected, start)


def in_words(value):
    """Return a result as short text."""
    if isinstance(value, torch.Tensor):
        return numbers(value)
    if isinstance(value, list):
        shown = ", ".join(in_words(each) for each in value[:SHOWN])
        return f"[{shown}]" if len(value) <= SHOWN else f"[{shown}, ...]"
    return str(value)[:100]


def numbers(tensor, start=0):
    """Return the numbers of a tensor from a position on, as short text."""
    flat = tensor.flatten()[start:]
    shown = ", ".join(f"{number:.6g}" for number in flat[:SHOWN].tolist())
    return f"[{shown}]" if len(flat) <= SHOWN else f"[{shown}, ...]"


def why_it_is_wrong(trial, wrong):
    """Return words for wrong results that are typical in every exercise; None if none fits."""
    actual, expected = trial.of_rank()
    factor = times(*differing(actual, expected))
    size = trial.world_size
    if factor == 0:
        return "All numbers are 0. Is the result written where the caller looks?"
    if factor and abs(factor - 1) > 1e-3:  # otherwise only the shape or the dtype differs
        if size > 1 and abs(factor - size) < 1e-3:
            return f"{size} times what is expected: added up over the ranks, but not averaged?"
        if size > 1 and abs(factor * size - 1) < 1e-3:
            return f"what is expected, divided by {size}: averaged, but not added up?"
        return f"{factor:.3g} times what is expected"
    for rank, other in trial.expected.items():
        if rank != trial.rank and not difference(actual, other):
            return f"this is what rank {rank} should have"
    right = ", ".join(str(rank) for rank in range(size) if rank not in wrong)
    if right:
        return f"ranks {right} are right" if "," in right else f"rank {right} is right"
    return None


def differing(actual, expected):
    """Return the tensors and numbers that differ: a list of them, and a list of the expected."""
    pairs = entries(actual, expected)
    if pairs is None:
        return ([actual], [expected]) if difference(actual, expected) else ([], [])
    found = [differing(left, right) for _, left, right in pairs]
    return sum((left for left, _ in found), []), sum((right for _, right in found), [])


def times(actual, expected):
    """Return the factor by which all numbers of a result differ from the expected; None: no factor.

    Works for tensors, for numbers, and for lists of them with the same factor.
    """
    left = torch.cat([each.double() for each in tensors_of(actual)] or [torch.zeros(0)])
    right = torch.cat([each.double() for each in tensors_of(expected)] or [torch.zeros(0)])
    if left.shape != right.shape or not right.any():
        return None
    factor = (left @ right / (right @ right)).item()
    return factor if torch.allclose(left, factor * right, rtol=1e-4, atol=1e-6) else None


def tensors_of(value):
    """Return the tensors and numbers in a result, each as a tensor with one axis."""
    if isinstance(value, torch.Tensor):
        return [value.flatten()]
    if isinstance(value, (int, float)):
        return [torch.tensor([value])]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return sum((tensors_of(each) for each in value), [])
    return []


def digits_of(rank, shape, dtype):
    """Return a tensor of a rank: 1, 2, 3, ... times 10**rank. A sum tells whose numbers it has."""
    count = torch.Size(shape).numel()
    return (10**rank * torch.arange(1, count + 1)).to(dtype).view(shape)


def contributions(number, parts):
    """Return how often each rank's number is in a sum, 0 to 2 times; None if there is no such way.

    `parts` has each rank's number. Powers of 10, for example: then there is one way at most.
    """
    for counts in itertools.product(range(3), repeat=len(parts)):
        total = sum(count * part for count, part in zip(counts, parts, strict=True))
        if abs(total - number) <= 1e-6 * max(1, abs(number)):
            return counts
    return None
