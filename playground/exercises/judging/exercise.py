"""What the check of an exercise has."""

import importlib

from instruments.facts import TOLERANCE
from judging.solution import solution_of


class Exercise:
    """What a module of checks/ has, and here the defaults of what is optional.

    For each of the CASES, its run(the learner's function, rank, world_size, **case) calls the
    function on each rank. expected(rank, world_size, **case) returns what run() should return. The
    function with the name of the exercise is its solution; of a fault, REPAIR is what is edited in
    its task, and WHY the reason. MISTAKES, on which the tests try the check, has edits of the
    solution by the words that the verdict should have. HINTS are three, with empty lines in
    between.

    Args:
        name: of the module.
    """

    NAME = ""  # of the function, if the module has another name
    HELPERS = ()  # the names of what --answer shows before the solution
    WORLD_SIZES = (1, 2, 3, 4, 5)
    JOIN = True  # whether the ranks are in a group when they call the function
    FAULT = ""  # how the verdict on the task of a fault begins
    RUNG_1 = ""  # what the first of two rungs is, as in "RIGHT for 7 numbers"; "": there is one
    RUNG_2 = ""  # what the second one adds, as in "Next: any length."
    CASES_OF_RUNG_1 = 1  # how many of the CASES the first one has
    ONLY = None  # the kinds of messages that are allowed; None: all
    INSTEAD = ""  # what is allowed, in words
    TOLERANCE = TOLERANCE
    LIMITS = {}  # see limits
    WORDS = {}  # by a pattern, which is searched in the lines of a verdict
    STARTS = False  # whether run(), with a function that does nothing, returns what was at first

    def __init__(self, name):
        self.name = name
        self.module = importlib.import_module(f"judging.checks.{name}")
        vars(self).update(vars(self.module))

    def __reduce__(self):
        """Every process finds it by its name."""
        return Exercise, (self.name,)

    def runs(self, size):
        """Return what runs one after another: (a function of the check, a number of ranks)."""
        return [(self.run, size)]

    def expected(self, rank, world_size, **case):
        """Return what run() should return."""
        return None

    def limits(self, rank, world_size, **case):
        """Return how many "messages", "bytes" and "rounds" of messages a rank of several needs."""
        return self.LIMITS

    def start(self, rank, world_size, **case):
        """Return what the result is before the learner's function does anything; None: unknown."""
        return self.run(nothing, rank, world_size, **case) if self.STARTS else None

    def explain(self, trial):
        """Return words on a Trial with wrong results, if the check has some."""
        return None

    @property
    def rungs(self):
        """How many rungs it has."""
        return 2 if self.RUNG_1 else 1

    @property
    def of_rung_1(self):
        """The names of the cases of the first of two rungs. In them, a rank may send too much."""
        return list(self.CASES)[: self.CASES_OF_RUNG_1] if self.RUNG_1 else []

    def solution(self, words=None):
        """Return its solution, or the function that has one of its MISTAKES."""
        return solution_of(self.module, self.MISTAKES[words] if words else ())


def nothing(first, *others):
    """Do nothing, in place of the learner's function, and return the first argument."""
    return first
