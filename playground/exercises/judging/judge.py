"""Judges the answer to an exercise: runs it on several ranks, compares, and says what is wrong.

A module of checks/ has CASES by name. For each of them, run(the learner's function, rank,
world_size, **case) calls the function on each rank, expected(rank, world_size, **case) returns what
run() should return, and limits() how many "messages", "bytes" and "rounds" a rank may use. The
function with the name of the exercise is its solution. HINTS are three, with empty lines between.
MISTAKES, which must not pass, has edits of the solution by the words that the verdict should have.
What else a check may have is in DEFAULTS of trial.py.
"""

import io
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from judging.traffic import lost_message, trace, used
from judging.trial import be_a_rank, check_of, crash_of_process
from judging.words import costs, in_ranks, why
from watch_ranks.facts import difference, first_wrong
from watch_ranks.ranks import free_port, news, started

SECONDS = 8  # for which all ranks may wait, or one computes, in a case
# Of several crashes, the first of these is told.
TOLD_FIRST = ("no group", "your turn", "forbidden", "ended", "error", "connection")
LINES = 20  # of a report, at most


@dataclass
class Verdict:
    """How an answer did on one number of ranks: "RIGHT", or what is wrong first."""

    kind: str
    size: int
    case: str = ""
    lines: list[str] = field(default_factory=list)
    messages: list[list] = field(default_factory=list)  # of each rank, in the last case
    printed: list[str] = field(default_factory=list)  # by each rank
    rank: int | None = None  # whose result is wrong first
    found: dict[int, object] = field(default_factory=dict)  # the result of each rank
    later: dict[int, object] = field(default_factory=dict)  # the same, a moment later
    expected: dict[int, object] = field(default_factory=dict)  # what it should be
    start: dict[int, object] = field(default_factory=dict)  # if the function did nothing


def judge(name, file, function=None, seconds=SECONDS, sizes=None, with_trace=False):
    """Judge an answer with one number of ranks after another. Returns whether it is right, and why.

    The second value is lines, of which the first one has the verdict.

    Args:
        name: the exercise.
        file: the path of the answer; None: the exercise's own solution.
        function: the name of the answer in the file; None: the exercise's own name. Without a file,
            the words on one of its MISTAKES; None: its solution.
        seconds: how long the ranks may wait in a case.
        sizes: the numbers of ranks; None: all that the exercise has.
        with_trace: whether to add who sends what to whom.
    """
    check = check_of(name)
    file = str(Path(file).resolve()) if file else check.module.__file__
    sizes = list(sizes or check.WORLD_SIZES)
    names = list(check.CASES)
    count = check.CASES_OF_RUNG_1 if check.RUNG_1 else 0
    lines = []
    for cases, with_costs in ((names[:count], False), (names[count:], True)):
        for size in sizes if cases else ():
            verdict = judge_size(check, file, function, size, cases, with_costs, seconds)
            if verdict.kind != "RIGHT":
                break
        if cases and verdict.kind != "RIGHT":
            case = f", {verdict.case}" if verdict.case else ""
            rung = f" (rung {2 if with_costs else 1} of 2)" if case and check.RUNG_1 else ""
            lines += [f"{verdict.kind} with {in_ranks([size])}{case}{rung}"]
            lines += [f"  {line}" for line in verdict.lines]
            break
        if not with_costs and cases:
            lines = [f"RIGHT {check.RUNG_1} with {in_ranks(sizes)}. Next: {check.RUNG_2}"]
    else:
        lines = [f"RIGHT with {in_ranks(sizes)}"]
    if verdict.kind == "your turn":
        return False, ["your turn"]
    if with_trace:
        lines.append(f"who sends what to whom, with {in_ranks([size])}:")
        lines += [f"  {line}" for line in trace(verdict.messages)]
    for rank, text in enumerate(verdict.printed):
        lines += [f"rank {rank} printed: {line}" for line in text.splitlines()[:5]]
    lines = lines if len(lines) <= LINES else [*lines[: LINES - 1], "..."]
    return verdict.kind == "RIGHT", [
        line if len(line) <= 200 else f"{line[:197]}..." for line in lines
    ]


def judge_size(check, file, function, size, cases, with_costs, seconds):
    """Judge an answer with one number of ranks, case by case. Returns the Verdict."""
    verdict = Verdict("RIGHT", size)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        settings = folder, check.name, file, function, size, free_port()
        with started(be_a_rank, size, folder, *settings) as ranks:
            for verdict.case in ["", *cases]:
                go_through(verdict, ranks, folder, file, seconds)
                if verdict.kind == "RIGHT" and verdict.case:
                    compare(check, verdict, with_costs, check.CASES[verdict.case])
                if verdict.kind != "RIGHT":
                    verdict.lines += why(check, verdict)
                    break
        printed = [folder / f"printed{rank}" for rank in range(size)]
        verdict.printed = [path.read_text(errors="replace")[:2000] for path in printed]
    return verdict


def go_through(verdict, ranks, folder, file, seconds):
    """Let all ranks run a case ("": join, and import the answer), for a Verdict."""
    for rank in ranks:
        rank.connection.send(verdict.case)
    verdict.messages = [[] for _ in ranks]
    crashes = {}
    left = set(range(len(ranks)))
    for rank, kind, value in news(ranks, seconds if verdict.case else max(seconds, 60)):
        number = rank.number
        if kind == "message":
            verdict.messages[number].append(value)
            continue
        left.discard(number)
        if kind == "crash":
            crashes[number] = value
        elif kind == "ended":
            crashes[number] = crash_of_process(rank, value, file, folder / f"printed{number}")
        elif verdict.case:  # only plain data is read, and no object of the learner
            both = [torch.load(io.BytesIO(each), weights_only=True) for each in value]
            verdict.found[number], verdict.later[number] = both
    if crashes:
        number = min(crashes, key=lambda each: TOLD_FIRST.index(crashes[each][0]))
        kind, error, frames = crashes[number]
        if kind == "no group":  # nothing of the learner has run
            raise RuntimeError(f"rank {number} could not join: {error}")
        verdict.kind = {"your turn": kind, "forbidden": "FORBIDDEN"}.get(kind, "CRASH")
        if verdict.kind == "CRASH":
            verdict.lines = [*f"rank {number}: {error}".splitlines(), *frames]
        else:
            verdict.lines = [error, *frames[-1:]]
    elif left:
        places = ["has finished"] * len(ranks)
        for number in left:
            does = ranks[number].ask()
            line = ranks[number].line_of(file)
            places[number] = f"{does} at your {line}" if line else f"{does} outside your function"
        verdict.kind = "HANG"
        verdict.lines = [f"rank {number} {place}" for number, place in enumerate(places)]


def compare(check, verdict, with_costs, case):
    """Compare what all ranks have returned and sent with what they should have, for a Verdict."""
    size = verdict.size
    verdict.expected = {rank: check.expected(rank, size, **case) for rank in range(size)}
    verdict.rank = rank = first_wrong(verdict.found, verdict.expected, check.TOLERANCE)
    if rank is not None:
        verdict.kind = "WRONG"
        place, actual, right = difference(
            *(verdict.found[rank], verdict.expected[rank], check.TOLERANCE)
        )
        there = f"rank {rank}, {place}:" if place else f"rank {rank} has"
        verdict.lines = [f"{there} {actual}", f"{'expected':<{len(there)}} {right}"]
        for other in range(size):
            args = (other, size)
            does = check.run(nothing, *args, **case) if check.STARTS else None
            verdict.start[other] = check.start(*args, **case) if does is None else does
    elif lost := lost_message(verdict.messages):
        verdict.kind, verdict.lines = "WRONG", [f"right numbers, but {lost}"]
    for rank in range(size) if with_costs and size > 1 and verdict.kind == "RIGHT" else ():
        limits = check.limits(rank, size, **case)
        for unit, number in used(verdict.messages, rank).items():
            if verdict.kind == "RIGHT" and unit in limits and number > limits[unit]:
                verdict.kind = "COSTLY"
                verdict.lines = [costs(rank, unit, number, limits[unit])]


def nothing(first, *others):
    """Do nothing, in place of the learner's function, and return the first argument."""
    return first
