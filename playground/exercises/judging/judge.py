"""Judges the answer to an exercise with several numbers of ranks, and tells what is wrong."""

import tempfile
from functools import partial
from pathlib import Path

from judging.attempt import SECONDS_FOR_A_CASE, Attempt, Exercise
from judging.trial import load_function
from judging.words import sizes_in_words

SECONDS_FOR_OTHERS = 1  # for a case with another number of ranks, when the verdict is known
LINES = 20  # how many lines a verdict has at most


def verdicts_on(name, file, function=None, seconds=None, sizes=None):
    """Judge an answer with one number of ranks after another.

    Args:
        name: the exercise.
        file: the path of the file with the answer; None: an answer of the exercise itself.
        function: the name of the answer in the file; None: the exercise's own name. Without a file,
            the words on one of its MISTAKES; None: its solution.
        seconds: for each case; None: as usual.
        sizes: the numbers of ranks; None: all that the exercise has.

    Returns:
        a Verdict for each number of ranks, in order.
    """
    exercise = Exercise(name)
    if file is None:
        file = exercise.module.__file__
        answer = partial(exercise.solution, function)
    else:
        file = str(Path(file).resolve())
        answer = partial(load_function, file, function or exercise.NAME or name)
    seconds = seconds or SECONDS_FOR_A_CASE
    verdicts = []
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes or exercise.WORLD_SIZES:
            own_folder = Path(folder) / f"ranks{size}"
            verdict = Attempt(exercise, size, own_folder, answer, file, seconds).verdict()
            verdicts.append(verdict)
            if verdict.kind == "your turn":
                break
            if verdict.passed == 0:  # what is left tells only for which numbers it is right
                seconds = min(seconds, SECONDS_FOR_OTHERS)
    return verdicts


def first_fault(verdicts):
    """Return the Verdict to tell, or None if all are right.

    It is that of the smallest number of ranks at fault, and a fault in the first rung goes first.
    """
    faults = [verdict for verdict in verdicts if verdict.kind != "RIGHT"]
    return min(faults, key=lambda verdict: verdict.passed, default=None)


def in_one_line(name, verdicts):
    """Return the state of an exercise in one line. It begins with RIGHT only if all is right."""
    fault = first_fault(verdicts)
    if fault is None:
        return right_in_words(verdicts)
    if fault.kind == "your turn":
        return "your turn"
    if Exercise(name).rungs == 1:
        return fault_in_words(fault)
    before = "rung 1 of 2 is RIGHT, rung 2" if fault.passed else "rung 1 of 2"
    return f"{before}: {fault_in_words(fault)}"


def right_in_words(verdicts, words=""):
    """Return that an answer is right with all numbers of ranks."""
    sizes = [verdict.world_size for verdict in verdicts]
    return f"RIGHT {words}with {sizes_in_words(sizes)}"


def fault_in_words(fault):
    """Return the first line about a fault."""
    case = f", {fault.case}" if fault.case else ""
    return f"{fault.kind} with {fault.ranks}{case}"


def right_only(exercise, verdicts, fault):
    """Return for which numbers of ranks an answer is right, if not for all; otherwise None."""
    if len(verdicts) < len(exercise.WORLD_SIZES):
        return None
    several = [verdict for verdict in verdicts if verdict.world_size > 1]
    right = [verdict.world_size for verdict in several if verdict.passed > fault.passed]
    if not right or len(right) == len(several):
        return None
    return f"right with {sizes_in_words(right)}"


def report(name, verdicts, with_trace=False):
    """Return what is printed about an answer: at most LINES lines. None if it is not written."""
    fault = first_fault(verdicts)
    told = fault or verdicts[min(2, len(verdicts) - 1)]
    if told.kind == "your turn":
        return None
    lines = lines_about(Exercise(name), verdicts, fault) if fault else [right_in_words(verdicts)]
    if with_trace:
        heading = "who sends what to whom"
        collectives = any(" calls " in line for line in told.trace)
        if collectives and not any(" -> " in line for line in told.trace):
            heading = "which collectives each rank calls"
        lines.append(f"{heading}, with {told.ranks}:")
        lines += [f"  {line}" for line in told.trace]
    for rank, text in enumerate(told.printed):
        # Gloo of PyTorch 2.9 prints a line when it connects.
        printed = [line for line in text.splitlines() if not line.startswith("[Gloo]")]
        lines += [f"rank {rank} printed: {line}" for line in printed[:5]]
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], "..."]
    return [line if len(line) <= 200 else f"{line[:197]}..." for line in lines]


def lines_about(exercise, verdicts, fault):
    """Return the lines about a fault, and about the rung before it, which is right."""
    lines = []
    if fault.passed == 1:
        right = right_in_words(verdicts, f"{exercise.RUNG_1} ")
        lines.append(f"{right}. Next: {exercise.RUNG_2}")
    rung = " (rung 1 of 2)" if exercise.rungs == 2 and fault.passed == 0 else ""
    lines.append(fault_in_words(fault) + rung)
    only = right_only(exercise, verdicts, fault)
    return lines + [f"  {line}" for line in [*fault.lines, fault.facts, fault.why, only] if line]
