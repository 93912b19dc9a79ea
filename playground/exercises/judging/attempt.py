"""An answer to an exercise on one number of ranks: it is run, and judged."""

import re
from dataclasses import dataclass, field

from instruments.facts import difference
from instruments.ranks import free_port, started
from judging.traffic import trace
from judging.trial import PRINTED, be_a_rank, go_through
from judging.words import LOST, costs, in_ranks, why_it_is_wrong

SECONDS_FOR_A_CASE = 8  # for which all ranks wait, or one computes; also for importing the file
KINDS = ("your turn", "forbidden", "ended", "error", "connection")  # which Crash is told first


@dataclass
class Verdict:
    """How an answer did on one number of ranks.

    Attributes:
        kind: "RIGHT", "WRONG", "COSTLY", "CRASH", "HANG" or "your turn".
        world_size: the number of ranks with which the exercise was checked.
        case: the case in words; empty if it is not about one case.
        ranks: the number of ranks in words, of all runs: "3 ranks", or "3, then 4 ranks".
        lines: what is wrong.
        facts: how the results differ.
        why: what the cause may be; None: unknown.
        is_clear: whether the lines say all that there is to say.
        trace: who sent what to whom, step by step.
        printed: what each rank has printed.
        passed: how many rungs of the exercise are right. It has one if the check has no RUNG_1.
    """

    kind: str
    world_size: int
    case: str = ""
    ranks: str = ""
    lines: list[str] = field(default_factory=list)
    facts: str | None = None
    why: str | None = None
    is_clear: bool = False
    trace: list[str] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)
    passed: int = 0

    def in_words(self):
        """Return the first line about a fault."""
        case = f", {self.case}" if self.case else ""
        return f"{self.kind} with {self.ranks}{case}"


class Attempt:
    """An answer to an exercise on one number of ranks.

    Args:
        exercise: the Exercise.
        size: the number of ranks with which the exercise is checked.
        folder: the ranks write here, in a folder for each case.
        function: returns the answer, in a rank.
        file: the file of the answer. Verdicts quote its lines.
        seconds: the time for a case.
    """

    later = 0.05  # after how many seconds a rank looks at its result again

    def __init__(self, exercise, size, folder, function, file, seconds=SECONDS_FOR_A_CASE):
        self.exercise = exercise
        self.size = size
        self.folder = folder
        self.function = function
        self.file = file
        self.seconds = seconds
        folder.mkdir()

    def place_of(self, case):
        """Return the folder in which a case runs. What is there, a later run can read."""
        place = self.folder / f"case{case}"
        place.mkdir(exist_ok=True)
        return place

    def output_of(self, number):
        """Return the file of what a rank prints."""
        return self.folder / f"printed{number}"

    def text_of(self, number):
        """Return the beginning of what a rank has printed."""
        with open(self.output_of(number), errors="replace") as file:
            return file.read(PRINTED)

    def verdict(self):
        """Run all cases until one is at fault. Returns the Verdict."""
        names = list(self.exercise.CASES)
        runs = self.exercise.runs(self.size)
        fault = None
        for number in range(len(runs)):
            verdict = self.verdict_on(runs[: number + 1], names, number == len(runs) - 1)
            if verdict.kind != "RIGHT":
                fault = verdict
                # Only the cases before this one can still be right.
                names = names[: names.index(fault.case)] if fault.case else []
                if not names:
                    break
        if fault is None:
            verdict.passed = self.exercise.rungs
            return verdict
        fault.passed = verdict.passed
        return fault

    def verdict_on(self, runs, names, last):
        """Run these cases in the last of the `runs`. What it returns counts if it is the `last`."""
        run, size = runs[-1]
        rung_1 = self.exercise.of_rung_1
        verdict = Verdict("RIGHT", self.size, ranks=in_ranks([size for _, size in runs]))
        for number in range(size):
            self.output_of(number).write_text("")
        with started(be_a_rank, size, self.folder, self, run, size, free_port()) as ranks:
            trial = go_through(self, ranks, "join")
            if trial.crashes or trial.places:
                # Nothing of the learner has run, so this is no verdict on the answer.
                raise RuntimeError(f"{size} ranks could not join: {trial}")
            for part, name in enumerate(["", *names], start=-1):
                trial = go_through(self, ranks, part if name else "import")
                trial.case = self.exercise.CASES.get(name, {})
                self.judge(trial, verdict, last and name, name not in rung_1)
                if name and (trial.verdict or not verdict.trace):
                    verdict.trace = trace(trial)
                if trial.verdict:
                    verdict.kind, verdict.case = trial.verdict, name
                    if name and not verdict.is_clear:
                        verdict.why = self.words_on(verdict, trial) or verdict.why
                    break
                if last and name in rung_1[-1:]:
                    verdict.passed = 1
        verdict.printed = [self.text_of(number) for number in range(size)]
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
            verdict.why = trial.why_it_hangs()
            return
        if not with_results:
            return
        for rank in all_ranks(trial):
            trial.expected[rank] = self.exercise.expected(rank, trial.world_size, **trial.case)
        wrong = [rank for rank in all_ranks(trial) if self.differs(trial.results, trial, rank)]
        lost = trial.lost_message()
        if wrong:
            self.judge_results(trial, verdict, wrong)
        elif lost:
            trial.verdict, verdict.is_clear = "WRONG", True
            verdict.lines = [f"right numbers, but {lost}"]
        elif with_costs and trial.world_size > 1:  # alone, a rank sends nothing
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
        place, actual, right = difference(*trial.of_rank(), self.exercise.TOLERANCE)
        there = f"rank {trial.rank}, {place}:" if place else f"rank {trial.rank} has"
        verdict.lines = [f"{there} {actual}", f"{'expected':<{len(there)}} {right}"]
        later = {**trial.results, **trial.later}
        if any(self.differs(later, trial, rank) for rank in wrong):
            for rank in all_ranks(trial):
                trial.start[rank] = self.exercise.start(rank, trial.world_size, **trial.case)
            verdict.facts = trial.sent_with_gaps()
            verdict.is_clear = verdict.facts is not None
            verdict.facts = verdict.facts or why_it_is_wrong(trial, self.exercise.TOLERANCE)
        else:
            verdict.is_clear = True
            verdict.why = "It is right a moment later: wait() for every request before you return."

    def judge_costs(self, trial, verdict):
        """Find a rank that sends more than is needed."""
        for rank in all_ranks(trial):
            limits = self.exercise.limits(rank, trial.world_size, **trial.case)
            for unit, number in trial.used(rank).items():
                if unit in limits and number > limits[unit]:
                    trial.verdict, trial.rank = "COSTLY", rank
                    verdict.lines = [costs(rank, unit, number, limits[unit])]
                    return

    def differs(self, results, trial, rank):
        """Return whether a result of a rank differs from what is expected."""
        return bool(difference(results[rank], trial.expected[rank], self.exercise.TOLERANCE))

    def words_on(self, verdict, trial):
        """Return the exercise's own words on a fault; None if it has none."""
        words = self.exercise.explain(trial) if verdict.kind == "WRONG" else None
        text = "\n".join([f"{verdict.kind}, {verdict.case}", *verdict.lines])
        for pattern, others in self.exercise.WORDS.items():
            if not words and re.search(pattern, text, re.S):
                words = others
        return words


def all_ranks(trial):
    """Return the numbers of all ranks."""
    return range(trial.world_size)
