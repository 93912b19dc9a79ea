"""Finds out which typical mistakes do what an answer at fault does, if a check is IMITATED.

Two mistakes may have one outcome. So a check is IMITATED only if its results tell the mistakes
apart.

MISTAKES of a check is a dict. A key is what to tell a learner. Its value is a function that has
this mistake, or pairs of texts. In each pair, the first one stands once in the solution, and the
second one replaces it.
"""

import importlib
import inspect
from functools import partial

from judging.attempt import Attempt, all_ranks
from judging.ranks import started
from judging.words import difference, used

SECONDS = 2  # for a mistake in one case


def name_of(exercise):
    """Return the name of what a learner writes, which is that of the solution, too."""
    return getattr(exercise, "NAME", exercise.__name__.rpartition(".")[2])


def functions_of(module, wanted):
    """Return functions of a check: its solution (None), and its MISTAKES (the words on each)."""
    exercise = importlib.import_module(module)
    found = []
    for words in wanted:
        if words is None:
            found.append(getattr(exercise, name_of(exercise)))
        else:
            mistake = exercise.MISTAKES[words]
            found.append(edited(exercise, *mistake) if isinstance(mistake, tuple) else mistake)
    return found


def edited(exercise, *texts):
    """Return the solution of an exercise with some of its text replaced."""
    name = name_of(exercise)
    source = inspect.getsource(getattr(exercise, name))
    for old, new in zip(texts[::2], texts[1::2], strict=True):
        if source.count(old) != 1:
            raise ValueError(f"{name} has {source.count(old)} times {old!r}")
        source = source.replace(old, new)
    names = dict(vars(exercise))
    exec(compile(source, exercise.__file__, "exec"), names)
    return names[name]


def like(attempt, lines):
    """Return the words on all mistakes that do in a case what an Attempt at fault does.

    Args:
        attempt: the Attempt.
        lines: those of its verdict. What they tell is not tried, and not what WORDS tells.
    """
    told = [*lines, *getattr(attempt.exercise, "WORDS", {}).values()]
    mistakes = []
    for words in attempt.exercise.MISTAKES:
        if not any(words in each for each in told):
            mistakes.append(words)
    copy = Attempt(attempt.exercise, attempt.size, attempt.folder / "mistakes", SECONDS)
    copy.load = partial(functions_of, attempt.module, mistakes)
    copy.later = 0
    pairs = zip(mistakes, trials(copy, len(mistakes), attempt.number), strict=True)
    return [words for words, trial in pairs if is_like(attempt.trial, trial, attempt.tolerance())]


def trials(attempt, functions, case):
    """Let each of so many functions run one case. Yields their Trials."""
    runs = attempt.runs()
    for run, size in runs:
        todo = list(range(functions))
        while todo:
            with started(attempt, run, size) as go:
                trial = go("join")
                while todo and not trial.crashes and not trial.places:
                    trial = go((todo.pop(0), case))
                    if (run, size) == runs[-1]:
                        yield trial


def is_like(answer, mistake, tolerance):
    """Return whether a mistake has the same results as an answer at fault, and the same costs."""
    for rank in all_ranks(answer):
        if rank not in mistake.results:  # it has failed
            return False
        if difference(mistake.results[rank], answer.results[rank], tolerance):
            return False
        if answer.verdict == "COSTLY" and used(mistake, rank) != used(answer, rank):
            return False
    return True
