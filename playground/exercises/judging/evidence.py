"""Reads what a learner has found in the evidence of a run, for the exercises that have some."""

from pathlib import Path

from judging.traffic import Forbidden

EVIDENCE = Path(__file__).resolve().parents[1] / "evidence"
CAUSES = ("batches", "left out", "order", "shapes", "ended", "data", "computing", "send")


class NotAtFault(Forbidden):
    """What the learner has found is not what is at fault. Its text is told."""


def what_is_found(found, name, *more):
    """Call the learner's function with a folder of the evidence. Returns what it has found.

    Args:
        found: the function.
        name: of the folder.
        more: what its dict has in addition to "rank", "line" and "cause".
    """
    parts = ("rank", "line", "cause", *more)
    answer = found(EVIDENCE / name)
    if not isinstance(answer, dict) or set(answer) != set(parts):
        raise NotAtFault(f"found() should return a dict with {', '.join(parts)}, not {answer}")
    if answer["rank"] not in range(4):
        raise NotAtFault(f"the rank is {answer['rank']}, but the ranks are 0, 1, 2 and 3")
    if answer["cause"] not in CAUSES:
        raise NotAtFault(f"the cause is {answer['cause']!r}, but not one of {', '.join(CAUSES)}")
    return [answer[part] for part in parts]


def refuse(*faults):
    """Raise an error with the words of the first fault: each is (whether it is there, words)."""
    for is_there, words in faults:
        if is_there:
            raise NotAtFault(words)


def lines_of(name, *texts):
    """Return the numbers of the lines of a program that have one of these texts."""
    lines = (EVIDENCE / name / "program.py").read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        if any(text in line for text in texts):
            found.append(number)
    return found
