"""Read the evidence: all ranks wait at one line.

Lesson: replicated/finding_hangs.py.

A program ran on four ranks. It hung, and ended at its timeout. What it has left behind is in
`playground/exercises/evidence/equal_stacks/`. "Read the evidence" in
`playground/exercises/README.md` tells what is in these files.

Write `found(folder)`, which returns a dict:
    "rank"   the number of the rank at fault
    "line"   the number of the line in program.py that makes it differ
    "cause"  what this rank does, as one of the words in README.md

You may read the files by yourself, and return what you have found, such as
    return {"rank": 3, "line": 9, "cause": "send"}

Your answer passes if
- the rank, the line and the cause are right.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_equal_stacks.py
"""

import json

from check import check


def found(folder):
    """Return what is at fault. The folder is a Path."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
