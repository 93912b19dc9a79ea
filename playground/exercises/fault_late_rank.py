"""Read the evidence: one rank is late.

Lesson: replicated/profile_steps.py.

A program ran on four ranks of one machine. Its model is tiny, but it was slow on all ranks. What it
has left behind is in `playground/exercises/evidence/late_rank/`. "Read the evidence" in
`playground/exercises/README.md` tells what is in these files.

Write `found(folder)`, which returns a dict:
    "rank"   the number of the rank at fault
    "line"   the number of the line in program.py at which it loses its time
    "cause"  what this rank does, as one of the words in README.md
    "milliseconds"  how much later than the first rank it comes to the call after this line.
        Compute it from the recorder's times, as the median over the steps

Your answer passes if
- the rank, the line and the cause are right;
- the milliseconds are right within 20% of the delay that was put in.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_late_rank.py
"""

import json
import statistics

from check import check


def found(folder):
    """Return what is at fault. The folder is a Path."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
