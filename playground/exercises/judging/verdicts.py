"""Judges what came of an exercise on one number of ranks, and says it in words.

A check is a module of the folder checks/. It can use the helpers times, contributions and numbers
for words of its own. If its exercise has two rungs, it has a Rung.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch
from ranks import started
from traffic import steps, trace

SHOWN = 8  # numbers of a tensor that are shown
LOST = "Another rank has left the group, or its process has ended, so the connection is lost."
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}  # unless a check has another


@dataclass
class Rung:
    """The first of the two rungs of an exercise. A check names it RUNG_1.

    The second rung has all cases, and no rank may send more than it needs to. The exercise is right
    when both rungs are.

    Attributes:
        cases: the cases of the first rung, which are the first ones of CASES.
        words: what they are, as in "RIGHT for 7 numbers".
        then: what the second rung adds, as in "Next: any length."
        costs: whether a rank that sends too much is at fault in the cases of the first rung.
    """

    cases: tuple[str, ...]
    words: str
    then: str
    costs: bool = False


@dataclass
class Outcome:
    """What an answer did in one case. A check's explain(outcome) puts it into words.

    Attributes:
        verdict: "WRONG", "COSTLY" or "HANG".
        world_size: the number of ranks.
        case: the arguments of the case, a dict.
        rank: the first rank at fault.
        results: what run() has returned on each rank, a dict. A tuple has become a list.
        expected: the same from expected(), a dict.
        messages: a list of Messages for each rank. See traffic.py.
    """

    verdict: str
    world_size: int
    case: dict
    rank: int
    results: dict
    expected: dict
    messages: list

    def of_rank(self):
        """Return what the rank at fault has, and what it should have."""
        return self.results[self.rank], self.expected[self.rank]


@dataclass
class Verdict:
    """How an answer did on one number of ranks.

    Attributes:
        kind: "RIGHT", "WRONG", "COSTLY", "CRASH", "HANG" or "your turn".
        world_size: the number of ranks with which the exercise was checked.
        case: the case in words; empty if it is not about one case.
        ranks: the number of ranks in words, of all runs: "3 ranks", or "3, then 4 ranks".
        lines: what is wrong.
        trace: who sent what to whom, step by step.
        printed: what each rank has printed.
        finished: whether all ranks have finished, or were ended with a verdict of their own.
        passed: how many rungs of the exercise are right. It has one if the check has no RUNG_1.
    """

    kind: str
    world_size: int
    case: str = ""
    ranks: str = ""
    lines: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    finished: bool = True
    passed: int = 0


def judge_worlds(exercise, worlds, tell):
    """Run an exercise in one world, or in several one after another. Returns a Verdict.

    Args:
        exercise: the module of checks/ that belongs to it.
        worlds: the Worlds. What run() returns is compared in the last one only.
        tell: called with 1 as soon as the first of two rungs is right.
    """
    sizes = []
    names = list(exercise.CASES)
    fault = None
    for world in worlds:
        sizes.append(world.size)
        last = world is worlds[-1]
        verdict = judge_world(exercise, world, names, last, tell)
        verdict.printed = world.printed
        verdict.ranks = in_ranks(sizes)
        if verdict.kind == "RIGHT":
            continue
        fault = verdict
        # Only the cases before this one can still be right.
        names = names[: names.index(fault.case)] if fault.case else []
        if not names:
            break
    if fault is None:
        verdict.passed = rungs(exercise)
        return verdict
    fault.passed = verdict.passed
    return fault


def rungs(exercise):
    """Return how many rungs an exercise has."""
    return 2 if hasattr(exercise, "RUNG_1") else 1


def in_ranks(sizes):
    """Return numbers of ranks in words, of one run or of several one after another."""
    words = ", then ".join(map(str, sizes))
    return f"{words} rank" if sizes[-1] == 1 else f"{words} ranks"


def judge_world(exercise, world, names, last, tell):
    """Run cases in one world until one is at fault. Returns the Verdict. See judge_worlds.

    Args:
        exercise: the module of checks/ that belongs to it.
        world: the World.
        names: the cases.
        last: whether to compare what run() returns.
        tell: called with 1 as soon as the first of two rungs is right.
    """
    with started(world) as go:
        for part in ("join", "import"):
            fault = judge_end(exercise, go(part), world, "", {})
            if fault is not None:
                return fault
        return judge_cases(exercise, world, names, last, tell, go)


def judge_cases(exercise, world, names, last, tell, go):
    """Run cases with go(number) until one is at fault. Returns the Verdict. See judge_world."""
    rung_1 = getattr(exercise, "RUNG_1", None)
    passed = 0
    first_trace = None
    for number, name in enumerate(names):
        trial = go(number)
        lines = trace(by_rank(trial, world))
        first_trace = first_trace or lines
        costs = rung_1 is None or rung_1.costs or name not in rung_1.cases
        verdict = judge_case(exercise, world, name, world.cases[number], trial, last, costs)
        if verdict is not None:
            verdict.trace = lines
            verdict.passed = passed
            return verdict
        if last and rung_1 is not None and name == rung_1.cases[-1]:
            passed = 1
            tell(passed)
    return Verdict("RIGHT", world.size, trace=first_trace, passed=passed)


def judge_case(exercise, world, name, case, trial, last, costs):
    """Return the Verdict on one case if it is at fault; otherwise None.

    What run() returns is compared only in the `last` world, and then what the ranks have sent, if
    `costs` count.
    """
    verdict = judge_end(exercise, trial, world, name, case)
    if verdict is None and last:
        verdict = judge_results(exercise, world, name, case, trial, costs)
    return verdict


def by_rank(trial, world):
    """Return a list of the Messages of each rank."""
    return [trial.messages[rank] for rank in range(world.size)]


def judge_end(exercise, trial, world, words, case):
    """Return the Verdict if a rank has failed or has not finished; otherwise None."""
    if trial.crashes:
        return judge_crashes(exercise, trial, world, words)
    if trial.places:
        return judge_hang(exercise, trial, world, words, case)
    return None


def judge_crashes(exercise, trial, world, words):
    """Return the Verdict if a rank has failed. The rank that was the first is described."""
    order = ["your turn", "forbidden", "ended", "error", "connection"]
    rank = min(trial.crashes, key=lambda each: order.index(trial.crashes[each].kind))
    crash = trial.crashes[rank]
    if crash.kind == "your turn":
        return Verdict("your turn", world.size)
    if crash.kind == "forbidden":
        text = crash.error.partition(": ")[2]
        return Verdict("WRONG", world.size, words, lines=[text, *crash.frames[-1:]])
    lines = [*f"rank {rank}: {crash.error}".splitlines(), *crash.frames]
    explained = None
    if hasattr(exercise, "explain_crash"):
        explained = exercise.explain_crash(crash)
    if crash.kind == "connection":
        explained = explained or LOST
    if explained:
        lines.append(explained)
    return Verdict("CRASH", world.size, words, lines=lines)


def judge_hang(exercise, trial, world, words, case):
    """Return the Verdict if a rank has not finished in time."""
    lines = []
    for rank in range(world.size):
        lines.append(f"rank {rank} {trial.places.get(rank, 'has finished')}")
    messages = by_rank(trial, world)
    outcome = Outcome("HANG", world.size, case, min(trial.places), trial.results, {}, messages)
    explained = explain_hang(outcome)
    if case:
        explained = explain(exercise, outcome) or explained
    if explained:
        lines.append(explained)
    return Verdict("HANG", world.size, words, lines=lines)


def explain(exercise, outcome):
    """Return the exercise's own words on an Outcome; None if it has none."""
    if not hasattr(exercise, "explain"):
        return None
    return exercise.explain(outcome)


def explain_hang(outcome):
    """Return words for a hang: which message is missing."""
    calls = [mine[-1] if mine else None for mine in outcome.messages]
    if all(call is not None and call.call == "send" for call in calls):
        return "Every rank waits in send until its message is received. Which rank receives?"
    sent, missing = steps(outcome.messages)
    for rank, recv in missing:
        if recv.peer is not None:
            return f"Rank {rank} waits for a message that rank {recv.peer} has not sent."
    for each in sent:
        if not each.received:
            return f"Rank {each.receiver} has not received a message from rank {each.sender}."
    if sent:
        return "Each message has a sender and a receiver. Is wait() called for each request?"
    calls = set()
    for mine in outcome.messages:
        calls.add(", ".join(each.call for each in mine))
    if len(calls) > 1:
        return "All ranks must call the same collectives in the same order."
    return None


def judge_results(exercise, world, words, case, trial, costs):
    """Compare what the ranks have returned, then what they have sent. Returns a Verdict or None."""
    expected = {}
    for rank in range(world.size):
        expected[rank] = exercise.expected(rank, world.size, **case)
    tolerance = getattr(exercise, "TOLERANCE", TOLERANCE)
    wrong = []
    for rank in range(world.size):
        if difference(trial.results[rank], expected[rank], tolerance):
            wrong.append(rank)
    messages = by_rank(trial, world)
    if wrong:
        outcome = Outcome("WRONG", world.size, case, wrong[0], trial.results, expected, messages)
        later = {**trial.results, **trial.later}
        waits = not any(difference(later[rank], expected[rank], tolerance) for rank in wrong)
        place, actual, right = difference(trial.results[wrong[0]], expected[wrong[0]], tolerance)
        there = f"rank {wrong[0]}, {place}:" if place else f"rank {wrong[0]} has"
        lines = [f"{there} {actual}", f"expected{' ' * (len(there) - len('expected'))} {right}"]
        if waits:
            explained = "It is right a moment later: wait() for every request before you return."
        else:
            explained = explain(exercise, outcome) or explain_wrong(outcome, wrong)
        if explained:
            lines.append(explained)
        return Verdict("WRONG", world.size, words, lines=lines)
    sent, missing = steps(messages)
    for each in sent:
        if not each.received:
            line = f"right numbers, but rank {each.receiver} has not received a message from rank "
            return Verdict("WRONG", world.size, words, lines=[f"{line}{each.sender}"])
    for rank, recv in missing:
        line = f"right numbers, but rank {rank} expects one more message"
        origin = f", from rank {recv.peer}" if recv.peer is not None else ""
        return Verdict("WRONG", world.size, words, lines=[line + origin])
    if costs and hasattr(exercise, "limits"):
        return judge_costs(exercise, world, words, case, trial, expected)
    return None


def judge_costs(exercise, world, words, case, trial, expected):
    """Return the Verdict COSTLY if a rank sends more than is needed; otherwise None."""
    messages = by_rank(trial, world)
    sent, _ = steps(messages)
    rounds = max((each.step for each in sent), default=0)
    for rank, mine in enumerate(messages):
        calls = [each for each in mine if each.kind != "recv"]
        used = {
            "bytes": sum(each.nbytes for each in calls),
            "messages": len(calls),
            "rounds": rounds,
        }
        limits = exercise.limits(rank, world.size, **case)
        for unit in ("rounds", "bytes", "messages"):
            if unit in limits and used[unit] > limits[unit]:
                lines = [costs(rank, unit, used[unit], limits[unit])]
                results = trial.results
                outcome = Outcome("COSTLY", world.size, case, rank, results, expected, messages)
                explained = explain(exercise, outcome)
                if explained:
                    lines.append(explained)
                return Verdict("COSTLY", world.size, words, lines=lines)
    return None


def costs(rank, unit, used, limit):
    """Return what is used and what is enough, in words."""
    verb = "is" if limit == 1 else "are"
    enough = f"{limit} {verb} enough"
    if unit == "rounds":
        return f"right numbers, but in {used} rounds of messages; {enough}"
    text = (
        f"right numbers, but rank {rank} sends {used} {unit if used > 1 else unit[:-1]}; {enough}"
    )
    if unit == "bytes" and limit and used / limit >= 1.5:
        text += f": {used / limit:.3g} times the {unit}"
    return text


def difference(actual, expected, tolerance):
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
        relative = tolerance["rtol"]
        absolute = tolerance["atol"]
        return math.isclose(actual, expected, rel_tol=relative, abs_tol=absolute)
    return actual == expected


def difference_of_tensors(actual, expected, tolerance):
    """Return the difference of two tensors as three texts, or None. See difference."""
    if not isinstance(actual, torch.Tensor):
        return "", in_words(actual), f"a tensor of shape {tuple(expected.shape)}"
    if actual.shape != expected.shape:
        shape = tuple(expected.shape)
        return "", f"a tensor of shape {tuple(actual.shape)}", f"a tensor of shape {shape}"
    if actual.dtype != expected.dtype:
        return "", f"numbers of {actual.dtype}", f"numbers of {expected.dtype}"
    same = torch.isclose(actual, expected, equal_nan=True, **tolerance).flatten()
    if same.all():
        return None
    first = same.int().argmin().item()
    start = 0 if first < SHOWN else first
    place = f"from position {start}" if start else ""
    return place, numbers(actual, start), numbers(expected, start)


def differing(actual, expected, tolerance):
    """Return the tensors and numbers that differ: a list of them, and a list of the expected."""
    pairs = entries(actual, expected)
    if pairs is None:
        if difference(actual, expected, tolerance):
            return [actual], [expected]
        return [], []
    wrong = []
    right = []
    for _, left, other in pairs:
        found, wanted = differing(left, other, tolerance)
        wrong += found
        right += wanted
    return wrong, right


def in_words(value):
    """Return a result as short text."""
    if isinstance(value, torch.Tensor):
        return numbers(value)
    if isinstance(value, list):
        entries = ", ".join(in_words(each) for each in value[:SHOWN])
        return f"[{entries}]" if len(value) <= SHOWN else f"[{entries}, ...]"
    return str(value)[:100]


def numbers(tensor, start=0):
    """Return the numbers of a tensor from a position on, as short text."""
    flat = tensor.flatten()[start:]
    shown = ", ".join(f"{number:.6g}" for number in flat[:SHOWN].tolist())
    return f"[{shown}]" if len(flat) <= SHOWN else f"[{shown}, ...]"


def explain_wrong(outcome, wrong):
    """Return words for wrong results that are typical in every exercise; None if none fits."""
    actual, expected = outcome.of_rank()
    factor = times(*differing(actual, expected, TOLERANCE))
    if factor and abs(factor - 1) < 1e-3:
        factor = None  # only the shape or the dtype differs
    size = outcome.world_size
    if factor == 0:
        return "All numbers are 0. Is the result written where the caller looks?"
    if factor and size > 1 and abs(factor - size) < 1e-3:
        return f"{size} times what is expected: added up over the ranks, but not averaged?"
    if factor and size > 1 and abs(factor * size - 1) < 1e-3:
        return f"what is expected, divided by {size}: averaged, but not added up?"
    if factor:
        return f"{factor:.3g} times what is expected"
    for rank, other in outcome.expected.items():
        if rank != outcome.rank and not difference(actual, other, TOLERANCE):
            return f"this is what rank {rank} should have"
    if len(wrong) < size:
        right = [str(rank) for rank in range(size) if rank not in wrong]
        if len(right) == 1:
            return f"rank {right[0]} is right"
        return f"ranks {', '.join(right)} are right"
    return None


def times(actual, expected):
    """Return the factor by which all numbers of a tensor differ from the expected; None: no factor.

    Works for numbers, too, and for lists of tensors with the same factor.
    """
    left = torch.cat([each.double() for each in tensors_of(actual)] or [torch.zeros(0)])
    right = torch.cat([each.double() for each in tensors_of(expected)] or [torch.zeros(0)])
    if left.shape != right.shape or not right.any():
        return None
    factor = (left @ right / (right @ right)).item()
    if torch.allclose(left, factor * right, rtol=1e-4, atol=1e-6):
        return factor
    return None


def tensors_of(value):
    """Return the tensors and numbers in a result, each as a tensor with one axis."""
    if isinstance(value, torch.Tensor):
        return [value.flatten()]
    if isinstance(value, (int, float)):
        return [torch.tensor([value])]
    found = []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for each in value:
            found += tensors_of(each)
    return found


def contributions(number, parts, most=2):
    """Return how often each rank's number is in a sum; None if there is no such way.

    Args:
        number: the sum.
        parts: each rank's number. Powers of 10, for example: then there is one way at most.
        most: how often a number is in the sum at most.
    """
    for counts in itertools.product(range(most + 1), repeat=len(parts)):
        total = sum(count * part for count, part in zip(counts, parts, strict=True))
        if abs(total - number) <= 1e-6 * max(1, abs(number)):
            return list(counts)
    return None
