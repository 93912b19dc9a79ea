"""An answer to an exercise on one number of ranks: it is run, and judged.

A check is a module of checks/. On each rank, its run(the learner's function, **case) calls the
function for each of the CASES. expected(rank, world_size, **case) returns what run() should return,
and limits(), with the same arguments, how much a rank may send. The function with the name of the
exercise is its solution, and NAME is this name if the module has another. MISTAKES has typical
mistakes (see imitate.py), and HINTS three hints with empty lines in between. The rest is optional:
HELPERS, the names of what --answer shows before the solution; RUNG_1, ONLY, INSTEAD, TOLERANCE,
WORLD_SIZES, JOIN, runs(), FAULT, IMITATED; explain(), which puts a Trial with wrong results into
words; and WORDS: patterns that are searched in the lines of a verdict, and what they tell.
"""

import importlib
import re
from dataclasses import dataclass, field

from judging.ranks import started
from judging.traffic import trace
from judging.words import (
    LOST,
    TOLERANCE,
    costs,
    difference,
    in_ranks,
    lost_message,
    used,
    why_it_hangs,
    why_it_is_wrong,
)

SECONDS_FOR_A_CASE = 8  # from when all ranks have started it; also for importing the file
PARTS = ("join", "import")  # before the cases
KINDS = ("your turn", "forbidden", "ended", "error", "connection")  # which Crash is told first


@dataclass
class Rung:
    """The first of the two rungs of an exercise. A check names it RUNG_1.

    The second rung has all cases, and no rank may send more than it needs to. The exercise is right
    when both rungs are. In the cases of the first rung, a rank may send too much.

    Attributes:
        cases: the cases of the first rung, which are the first ones of CASES.
        words: what they are, as in "RIGHT for 7 numbers".
        then: what the second rung adds, as in "Next: any length."
    """

    cases: tuple[str, ...]
    words: str
    then: str


@dataclass
class Verdict:
    """How an answer did on one number of ranks.

    Attributes:
        kind: "RIGHT", "WRONG", "COSTLY", "CRASH", "HANG" or "your turn".
        world_size: the number of ranks with which the exercise was checked.
        case: the case in words; empty if it is not about one case.
        ranks: the number of ranks in words, of all runs: "3 ranks", or "3, then 4 ranks".
        lines: what is wrong.
        why: what the cause may be; None: unknown.
        is_clear: whether the cause is known. Otherwise the typical mistakes are tried.
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
    why: str | None = None
    is_clear: bool = False
    trace: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    finished: bool = True
    passed: int = 0


class Attempt:
    """An answer to an exercise on one number of ranks.

    Args:
        exercise: the module of checks/.
        size: the number of ranks with which the exercise is checked.
        folder: the ranks write here, in a folder for each case.
        seconds: the time for a case; None: SECONDS_FOR_A_CASE.

    Attributes:
        file: the file of the answer. Verdicts quote its lines.
        name: the name of the answer in it.
        load: None, or what a rank calls for the functions that it tries in place of the answer.
        later: after how many seconds a rank looks at its result again; 0: it does not, and no rank
            starts its messages later than the others.
        printed: what each rank has printed.
        trial: the last Trial, and `number`, the number of its case.
    """

    seconds_for_others = 0.3  # after a rank has failed
    later = 0.05

    def __init__(self, exercise, size, folder, seconds=None):
        self.module = exercise.__name__
        self.size = size
        self.folder = folder
        self.seconds = seconds or SECONDS_FOR_A_CASE
        self.file = exercise.__file__
        self.name = ""
        self.load = None
        self.printed = []
        self.trial = None
        self.number = 0
        folder.mkdir()

    @property
    def exercise(self):
        """The module of checks/. By its name, every process finds it."""
        return importlib.import_module(self.module)

    def runs(self):
        """Return what runs one after another: (a function of the check, a number of ranks)."""
        if hasattr(self.exercise, "runs"):
            return self.exercise.runs(self.size)
        return [(self.exercise.run, self.size)]

    def place_of(self, function, case):
        """Return the folder in which a case runs. What is there, a later run can read."""
        return self.folder / f"function{function}-case{case}"

    def verdict(self, tell):
        """Run all cases until one is at fault. Returns the Verdict.

        Args:
            tell: called with 1 as soon as the first of two rungs is right.
        """
        names = list(self.exercise.CASES)
        runs = self.runs()
        fault = None
        for number in range(len(runs)):
            verdict = self.verdict_on(runs[: number + 1], names, number == len(runs) - 1, tell)
            if verdict.kind != "RIGHT":
                fault = verdict
                # Only the cases before this one can still be right.
                names = names[: names.index(fault.case)] if fault.case else []
                if not names:
                    break
        if fault is not None:
            fault.passed = verdict.passed
            return fault
        verdict.passed = rungs(self.exercise)
        return verdict

    def verdict_on(self, runs, names, last, tell):
        """Run these cases in the last of the `runs`. What it returns counts if it is the `last`."""
        run, size = runs[-1]
        rung_1 = getattr(self.exercise, "RUNG_1", None)
        verdict = Verdict("RIGHT", size, ranks=in_ranks([size for _, size in runs]))
        with started(self, run, size) as go:
            for self.number, name in enumerate(["", "", *names], start=-2):
                self.trial = trial = go((0, self.number) if name else PARTS[self.number])
                if self.number == -2 and (trial.crashes or trial.places):
                    # Nothing of the learner has run, so this is no verdict on the answer.
                    raise RuntimeError(f"{size} ranks could not join: {trial}")
                trial.case = self.exercise.CASES.get(name, {})
                free = rung_1 is not None and name in rung_1.cases
                self.judge(trial, verdict, last and name, not free)
                if name and (trial.verdict or not verdict.trace):
                    verdict.trace = trace(trial.messages)
                if trial.verdict:
                    verdict.kind, verdict.case = trial.verdict, name
                    words = self.words_on(verdict) if name and not verdict.is_clear else None
                    verdict.why = words or verdict.why
                    verdict.is_clear |= bool(words) or trial.verdict in ("CRASH", "HANG")
                    break
                if last and rung_1 is not None and name == rung_1.cases[-1]:
                    verdict.passed = 1
                    tell(1)
        verdict.printed = self.printed
        return verdict

    def judge(self, trial, verdict, with_results, with_costs):
        """Set the verdict of a Trial, and describe a fault in the Verdict."""
        if trial.crashes:
            self.judge_crash(trial, verdict)
            return
        if trial.places:
            trial.verdict, trial.rank = "HANG", min(trial.places)
            places = [trial.places.get(rank, "has finished") for rank in all_ranks(trial)]
            verdict.lines = [f"rank {rank} {place}" for rank, place in enumerate(places)]
            verdict.why = why_it_hangs(trial)
            return
        if not with_results:
            return
        for rank in all_ranks(trial):
            trial.expected[rank] = self.exercise.expected(rank, trial.world_size, **trial.case)
        wrong = [rank for rank in all_ranks(trial) if self.differs(trial.results, trial, rank)]
        lost = lost_message(trial)
        if wrong:
            self.judge_results(trial, verdict, wrong)
        elif lost:
            trial.verdict, verdict.is_clear = "WRONG", True
            verdict.lines = [f"right numbers, but {lost}"]
        elif with_costs and hasattr(self.exercise, "limits"):
            self.judge_costs(trial, verdict)

    def judge_crash(self, trial, verdict):
        """Describe the rank that has failed, or whose failure is not due to another one's."""
        trial.rank = min(trial.crashes, key=lambda rank: KINDS.index(trial.crashes[rank].kind))
        crash = trial.crashes[trial.rank]
        verdict.is_clear = crash.kind in ("your turn", "forbidden")
        if crash.kind == "your turn":
            trial.verdict = "your turn"
        elif crash.kind == "forbidden":
            trial.verdict = "WRONG"
            verdict.lines = [crash.error.partition(": ")[2], *crash.frames[-1:]]
        else:
            trial.verdict = "CRASH"
            verdict.lines = [*f"rank {trial.rank}: {crash.error}".splitlines(), *crash.frames]
            verdict.why = LOST if crash.kind == "connection" else None

    def judge_results(self, trial, verdict, wrong):
        """Show the first wrong result."""
        trial.verdict, trial.rank = "WRONG", wrong[0]
        place, actual, right = difference(*trial.of_rank(), self.tolerance())
        there = f"rank {trial.rank}, {place}:" if place else f"rank {trial.rank} has"
        verdict.lines = [f"{there} {actual}", f"{'expected':<{len(there)}} {right}"]
        verdict.why = why_it_is_wrong(trial, wrong)
        later = {**trial.results, **trial.later}
        if not any(self.differs(later, trial, rank) for rank in wrong):
            verdict.is_clear = True
            verdict.why = "It is right a moment later: wait() for every request before you return."

    def judge_costs(self, trial, verdict):
        """Find a rank that sends more than is needed."""
        for rank in all_ranks(trial):
            limits = self.exercise.limits(rank, trial.world_size, **trial.case)
            for unit, number in used(trial, rank).items():
                if unit in limits and number > limits[unit]:
                    trial.verdict, trial.rank = "COSTLY", rank
                    verdict.lines = [costs(rank, unit, number, limits[unit], trial.world_size)]
                    return

    def differs(self, results, trial, rank):
        """Return whether a result of a rank differs from what is expected."""
        return bool(difference(results[rank], trial.expected[rank], self.tolerance()))

    def tolerance(self):
        """Return by how much numbers may differ."""
        return getattr(self.exercise, "TOLERANCE", TOLERANCE)

    def words_on(self, verdict):
        """Return the exercise's own words on a fault; None if it has none."""
        if verdict.kind == "WRONG" and hasattr(self.exercise, "explain"):
            words = self.exercise.explain(self.trial)
            if words:
                return words
        text = "\n".join([f"{verdict.kind}, {verdict.case}", *verdict.lines])
        for pattern, words in getattr(self.exercise, "WORDS", {}).items():
            if re.search(pattern, text, re.S):
                return words
        return None


def rungs(exercise):
    """Return how many rungs an exercise has."""
    return 2 if hasattr(exercise, "RUNG_1") else 1


def all_ranks(trial):
    """Return the numbers of all ranks."""
    return range(trial.world_size)
