"""Judges the answer to an exercise with several numbers of ranks, and puts the verdict into words.

For each number of ranks, verdicts_on starts a process, the judge. The judge makes an Attempt, which
starts the ranks, and sends what it finds. All of them run side by side.
"""

import importlib
import signal
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path

from judging.attempt import Attempt, Verdict, rungs
from judging.imitate import functions_of, like, name_of
from judging.ranks import adopt_orphans, context, die_with_parent, end_children
from judging.words import in_ranks, sizes_in_words

WORLD_SIZES = (1, 2, 3, 4, 5)
# For all of them together. A rank that waits is found earlier, by the time for a case: this ends
# answers that are slow in many cases, and is long enough for right ones on a busy machine.
SECONDS = 60
SECONDS_FOR_OTHERS = 4  # for the others, when the verdict is known
SECONDS_FOR_MISTAKES = 20
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

    process: context.Process
    connection: Connection
    passed: int = 0
    verdict: Verdict | None = None


def check_of(name):
    """Return the module that checks an exercise."""
    return importlib.import_module(f"judging.checks.{name}")


def all_sizes(exercise):
    """Return the numbers of ranks with which an exercise is checked."""
    return getattr(exercise, "WORLD_SIZES", WORLD_SIZES)


def verdicts_on(name, file, function=None, seconds=None, sizes=None):
    """Judge an answer with several numbers of ranks side by side.

    Args:
        name: the exercise.
        file: the path of the file with the answer; None: an answer of the exercise itself.
        function: the name of the answer in the file; None: the exercise's own name. Without a file,
            the words on one of its MISTAKES; None: its solution.
        seconds: for each case; None: as usual.
        sizes: the numbers of ranks; None: all that the exercise has.

    Returns:
        a Verdict for each number of ranks, in order.

    Raises:
        RuntimeError: if the check itself has failed.
    """
    exercise = check_of(name)
    judges = {}
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for size in sizes or all_sizes(exercise):
                ours, theirs = context.Pipe()
                attempt = Attempt(exercise, size, Path(folder) / f"ranks{size}", seconds)
                if file is None:
                    attempt.load = partial(functions_of, exercise.__name__, [function])
                else:
                    attempt.file = str(Path(file).resolve())
                    attempt.name = function or name_of(exercise)
                process = context.Process(target=judge, args=(attempt, theirs))
                process.start()
                theirs.close()
                judges[size] = Judge(process, ours)
            listen(judges)
            if getattr(exercise, "IMITATED", False):
                find_mistake(judges)
        finally:
            end_children()
    return [each.verdict for each in judges.values()]


def judge(attempt, connection):
    """Send the Verdict on one number of ranks, and words on a mistake like it if asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    die_with_parent()
    adopt_orphans()
    verdict = attempt.verdict(connection.send)
    connection.send(verdict)
    connection.recv()
    connection.send(like(attempt, verdict.lines))


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
        if decided(judges):
            end = min(end, time.monotonic() + SECONDS_FOR_OTHERS)
    for size, each in judges.items():
        if each.verdict is None:
            line = f"not all ranks have finished after {SECONDS} seconds"
            line += f": --ranks {size} checks this number of ranks by itself"
            each.verdict = Verdict("HANG", size, "", in_ranks([size]), [line], finished=False)
            each.verdict.passed = each.passed
            each.verdict.is_clear = True


def find_mistake(judges):
    """Put words on the verdict to tell, if a typical mistake does what the answer does.

    Mistakes may do the same with 1 or 2 ranks, so a judge with more ranks tries them, too.
    """
    told = decided(judges)
    if told is None or judges[told].verdict.is_clear or not judges[told].process.is_alive():
        return
    fault = judges[told].verdict
    same = [each for size, each in judges.items() if size > max(2, told)]
    same = [
        each for each in same if (each.verdict.kind, each.verdict.case) == (fault.kind, fault.case)
    ]
    asked = [judges[told], *same[:1]]
    for each in asked:
        each.connection.send("like")
    found = [each.connection.recv() for each in asked if each.connection.poll(SECONDS_FOR_MISTAKES)]
    common = [words for words in found[0] if words in found[-1]] if found else []
    fault.why = common[0] if common else fault.why


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
    return Verdict("CRASH", size, "", in_ranks([size]), [line], passed=judge.passed)


def decided(judges):
    """Return the number of ranks whose fault will be told; None: it is not known, or there is none.

    It is the smallest number of ranks among those of the lowest rung. The other verdicts are only
    needed to say for which numbers of ranks an answer is right.
    """
    lowest = min(each.passed for each in judges.values())
    size, first = next((size, each) for size, each in judges.items() if each.passed == lowest)
    return size if first.verdict is not None and first.verdict.kind != "RIGHT" else None


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
    if rungs(check_of(name)) == 1:
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
    if len(verdicts) < len(all_sizes(exercise)):
        return None
    several = [verdict for verdict in verdicts if verdict.world_size > 1 and verdict.finished]
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
    lines = lines_about(check_of(name), verdicts, fault) if fault else [right_in_words(verdicts)]
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
        right = right_in_words(verdicts, f"{exercise.RUNG_1.words} ")
        lines.append(f"{right}. Next: {exercise.RUNG_1.then}")
    rung = " (rung 1 of 2)" if rungs(exercise) == 2 and fault.passed == 0 else ""
    lines.append(fault_in_words(fault) + rung)
    only = right_only(exercise, verdicts, fault)
    return lines + [f"  {line}" for line in [*fault.lines, fault.why, only] if line]
