"""Judges the answer to an exercise with several numbers of ranks, and puts the verdict into words.

For each number of ranks, verdicts_on starts a process, the judge. The judge starts the ranks (see
ranks.py), and sends what it finds (see verdicts.py). All of them run side by side.
"""

import importlib
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

# These are read when torch is imported. Each rank computes in one thread, and none uses a GPU.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from ranks import SECONDS_FOR_A_CASE, World, adopt_orphans, die_with_parent, end_children, fork
from verdicts import Verdict, in_ranks, judge_worlds, rungs

WORLD_SIZES = (1, 2, 3, 4, 5)
# For all of them together. A rank that waits is found earlier, by the time for a case: this ends
# answers that are slow in many cases, and is long enough for right ones on a busy machine.
SECONDS = 60
SECONDS_FOR_OTHERS = 4  # for the others, when the verdict is known
LINES = 20  # how many lines a verdict has at most


@dataclass
class Judge:
    """The process that judges an answer with one number of ranks, seen from verdicts_on.

    Attributes:
        process: the process.
        connection: what it sends comes here.
        passed: how many rungs are right, as far as is known.
        verdict: its Verdict, or None.
    """

    process: fork.Process
    connection: Connection
    passed: int = 0
    verdict: Verdict | None = None


def check_of(name):
    """Return the module that checks an exercise."""
    return importlib.import_module(f"checks.{name}")


def verdicts_on(name, file, function=None, seconds=None, sizes=None):
    """Judge an answer with several numbers of ranks side by side.

    Args:
        name: the exercise.
        file: the path of the file with the answer.
        function: the name of the answer in it; None: the exercise's own name.
        seconds: for each case; None: as the check has it.
        sizes: the numbers of ranks; None: all that the exercise has.

    Returns:
        a Verdict for each number of ranks, in order.

    Raises:
        RuntimeError: if the check itself has failed.
    """
    exercise = check_of(name)
    file = str(Path(file).resolve())
    function = function or getattr(exercise, "NAME", name)
    sizes = sizes or all_sizes(exercise)
    seconds = seconds or getattr(exercise, "SECONDS", SECONDS_FOR_A_CASE)
    judges = {}
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for size in sizes:
                ours, theirs = fork.Pipe(duplex=False)
                worlds = worlds_of(exercise, size, file, function, Path(folder), seconds)
                process = fork.Process(target=judge, args=(exercise, worlds, theirs))
                process.start()
                theirs.close()
                judges[size] = Judge(process, ours)
            listen(judges)
        finally:
            end_children()
    verdicts = []
    for size, each in judges.items():
        if each.verdict is None:
            line = f"not all ranks have finished after {SECONDS} seconds"
            line += f": --ranks {size} checks this number of ranks by itself"
            ranks = in_ranks([size])
            each.verdict = Verdict("HANG", size, ranks=ranks, lines=[line], finished=False)
            each.verdict.passed = each.passed
        verdicts.append(each.verdict)
    return verdicts


def listen(judges):
    """Take what the judges send, until the verdict is known, or for SECONDS."""
    end = time.monotonic() + SECONDS
    waiting = {each.connection: size for size, each in judges.items()}
    while waiting and time.monotonic() < end:
        for connection in wait(list(waiting), max(0, end - time.monotonic())):
            size = waiting[connection]
            news = news_from(judges[size], size)
            if isinstance(news, Verdict):
                judges[size].verdict = news
                judges[size].passed = news.passed
                del waiting[connection]
            else:
                judges[size].passed = news
        if is_decided(judges):
            end = min(end, time.monotonic() + SECONDS_FOR_OTHERS)


def all_sizes(exercise):
    """Return the numbers of ranks with which an exercise is checked."""
    return getattr(exercise, "WORLD_SIZES", WORLD_SIZES)


def news_from(judge, size):
    """Return what a judge has sent. The learner's code may have ended the judge.

    Raises:
        RuntimeError: if the judge has failed by itself. Its traceback has been printed.
    """
    try:
        news = judge.connection.recv()
        if isinstance(news, Verdict):
            news.world_size = size
        return news
    except EOFError:
        judge.process.join()
    if judge.process.exitcode > 0:
        raise RuntimeError("the check itself has failed")
    name = signal.Signals(-judge.process.exitcode).name
    line = f"the process that watches the ranks was ended by {name}"
    ranks = in_ranks([size])
    return Verdict("CRASH", size, ranks=ranks, lines=[line], passed=judge.passed)


def is_decided(judges):
    """Return whether it is known which fault will be told. Some judges may lack a verdict.

    It is the one with the smallest number of ranks among those of the lowest rung. The other
    verdicts are only needed to say for which numbers of ranks an answer is right.
    """
    lowest = min(each.passed for each in judges.values())
    for each in judges.values():
        if each.passed > lowest:
            continue
        return each.verdict is not None and each.verdict.kind != "RIGHT"
    return False


def worlds_of(exercise, size, file, function, folder, seconds):
    """Return the Worlds of an exercise for one number of ranks: one, unless it has `runs`."""
    place = folder / f"ranks{size}"
    place.mkdir()
    if hasattr(exercise, "runs"):
        runs = exercise.runs(size)
    else:
        runs = [(exercise.run, size)]
    worlds = []
    for run, ranks in runs:
        world = World(
            size=ranks,
            file=file,
            name=function,
            run=run,
            cases=list(exercise.CASES.values()),
            folder=place,
            join=getattr(exercise, "JOIN", True),
            only=getattr(exercise, "ONLY", None),
            instead=getattr(exercise, "INSTEAD", ""),
            seconds=seconds,
        )
        worlds.append(world)
    return worlds


def judge(exercise, worlds, connection):
    """Send the Verdict on one number of ranks. Runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    die_with_parent()
    adopt_orphans()
    connection.send(judge_worlds(exercise, worlds, connection.send))


def first_fault(verdicts):
    """Return the Verdict to tell, or None if all are right.

    It is that of the smallest number of ranks at fault, and a fault in the first rung goes first.
    """
    faults = [verdict for verdict in verdicts if verdict.kind != "RIGHT"]
    return min(faults, key=lambda verdict: verdict.passed, default=None)


def sizes_in_words(sizes):
    """Return numbers of ranks as text, such as "1, 2 and 3 ranks"."""
    *others, last = map(str, sizes)
    first = f"{', '.join(others)} and " if others else ""
    return f"{first}{last} rank" if sizes == [1] else f"{first}{last} ranks"


def in_one_line(name, verdicts):
    """Return the state of an exercise in one line. It begins with RIGHT only if all is right."""
    exercise = check_of(name)
    fault = first_fault(verdicts)
    if fault is None:
        return right_in_words(verdicts)
    if fault.kind == "your turn":
        return "your turn"
    if rungs(exercise) == 1:
        return fault_in_words(fault)
    if fault.passed == 0:
        return f"rung 1 of 2: {fault_in_words(fault)}"
    return f"rung 1 of 2 is RIGHT, rung 2: {fault_in_words(fault)}"


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
    if len(verdicts) < len(all_sizes(exercise)):
        return None
    even_only = getattr(exercise, "EVEN_ONLY", "right for even numbers of ranks only")
    several = [verdict for verdict in verdicts if verdict.world_size > 1 and verdict.finished]
    right = [verdict.world_size for verdict in several if verdict.passed > fault.passed]
    even = [verdict.world_size for verdict in several if verdict.world_size % 2 == 0]
    odd = [verdict.world_size for verdict in several if verdict.world_size % 2 == 1]
    if not right or len(right) == len(several):
        return None
    if right == even and len(even) > 1:
        return even_only
    if right == odd and len(odd) > 1:
        return "right for odd numbers of ranks only"
    return f"right with {sizes_in_words(right)}"


def report(name, verdicts, with_trace=False):
    """Return what is printed about an answer: at most LINES lines. None if it is not written."""
    exercise = check_of(name)
    fault = first_fault(verdicts)
    told = fault or verdicts[min(2, len(verdicts) - 1)]
    if told.kind == "your turn":
        return None
    lines = []
    if fault is None:
        lines.append(right_in_words(verdicts))
    else:
        lines += lines_about(exercise, verdicts, fault)
    if with_trace:
        heading = "who sends what to whom"
        if any(" calls " in line for line in told.trace):
            heading = "which collectives each rank calls"
        if any(" -> " in line for line in told.trace):
            heading = "who sends what to whom"
        lines.append(f"{heading}, with {told.ranks}:")
        lines += [f"  {line}" for line in told.trace]
    for rank, text in enumerate(told.printed):
        # Gloo of PyTorch 2.9 prints a line when it connects.
        printed = [line for line in text.splitlines() if not line.startswith("[Gloo]")]
        for line in printed[:5]:
            lines.append(f"rank {rank} printed: {line}")
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], "..."]
    return [line if len(line) <= 200 else f"{line[:197]}..." for line in lines]


def lines_about(exercise, verdicts, fault):
    """Return the lines about a fault, and about the rung before it, which is right."""
    lines = []
    if fault.passed == 1:
        right = right_in_words(verdicts, f"{exercise.RUNG_1.words} ")
        lines.append(f"{right}. Next: {exercise.RUNG_1.then}")
    lines.append(fault_in_words(fault))
    if rungs(exercise) == 2 and fault.passed == 0:
        lines[-1] += " (rung 1 of 2)"
    lines += [f"  {line}" for line in fault.lines]
    only = right_only(exercise, verdicts, fault)
    if only:
        lines.append(f"  {only}")
    return lines
