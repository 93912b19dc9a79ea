"""Judges the answer to an exercise with several numbers of ranks, and tells what is wrong."""

import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from judging.attempt import SECONDS_FOR_A_CASE, Attempt, Verdict
from judging.exercise import Exercise
from judging.trial import load_function
from judging.words import sizes_in_words

SECONDS_FOR_OTHERS = 1  # for a case with another number of ranks, when the verdict is known
LINES = 20  # how many lines a report has at most


def judge(name, file, function=None, seconds=None, sizes=None):
    """Judge an answer with one number of ranks after another. Returns what came of it, a Judged.

    Args:
        name: the exercise.
        file: the path of the file with the answer; None: an answer of the exercise itself.
        function: the name of the answer in the file; None: the exercise's own name. Without a file,
            the words on one of its MISTAKES; None: its solution.
        seconds: for each case; None: as usual.
        sizes: the numbers of ranks; None: all that the exercise has.
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
    return Judged(exercise, verdicts)


@dataclass
class Judged:
    """What came of an answer.

    Attributes:
        exercise: the Exercise.
        verdicts: a Verdict for each number of ranks, in order.
    """

    exercise: Exercise
    verdicts: list[Verdict]

    @property
    def fault(self):
        """The Verdict to tell, or None if all are right.

        It is that of the smallest number of ranks at fault. A fault in the first rung goes first.
        """
        faults = [verdict for verdict in self.verdicts if verdict.kind != "RIGHT"]
        return min(faults, key=lambda verdict: verdict.passed, default=None)

    def in_one_line(self):
        """Return the state of the exercise. It begins with RIGHT only if all is right."""
        fault = self.fault
        if fault is None:
            return self.right_in_words()
        if fault.kind == "your turn":
            return "your turn"
        if self.exercise.rungs == 1:
            return fault.in_words()
        before = "rung 1 of 2 is RIGHT, rung 2" if fault.passed else "rung 1 of 2"
        return f"{before}: {fault.in_words()}"

    def right_in_words(self, words=""):
        """Return that the answer is right with all numbers of ranks."""
        sizes = [verdict.world_size for verdict in self.verdicts]
        return f"RIGHT {words}with {sizes_in_words(sizes)}"

    def right_only(self, fault):
        """Return for which numbers of ranks the answer is right, if not for all; else None."""
        if len(self.verdicts) < len(self.exercise.WORLD_SIZES):
            return None
        several = [verdict for verdict in self.verdicts if verdict.world_size > 1]
        right = [verdict.world_size for verdict in several if verdict.passed > fault.passed]
        if not right or len(right) == len(several):
            return None
        return f"right with {sizes_in_words(right)}"

    def report(self, with_trace=False):
        """Return what is printed: at most LINES lines. None if the answer is not written."""
        fault = self.fault
        told = fault or self.verdicts[min(2, len(self.verdicts) - 1)]
        if told.kind == "your turn":
            return None
        lines = self.lines_about(fault) if fault else [self.right_in_words()]
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

    def lines_about(self, fault):
        """Return the lines about a fault, and about the rung before it, which is right."""
        lines = []
        if fault.passed == 1:
            right = self.right_in_words(f"{self.exercise.RUNG_1} ")
            lines.append(f"{right}. Next: {self.exercise.RUNG_2}")
        rung = " (rung 1 of 2)" if self.exercise.rungs == 2 and fault.passed == 0 else ""
        lines.append(fault.in_words() + rung)
        more = [*fault.lines, fault.facts, fault.why, self.right_only(fault)]
        return lines + [f"  {line}" for line in more if line]
