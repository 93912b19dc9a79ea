"""Read the evidence: all ranks wait at one line.

Lesson: replicated/finding_hangs.py.

A program ran on four ranks. It hung, and ended at its timeout. The folder
`playground/exercises/evidence/equal_stacks/` has
    program.py      the program. Each rank has called train()
    log.txt         what the ranks have printed, and their errors at the timeout
    stack0.txt      where rank 0 was in the hang, and so on for the other ranks
    recorder0.json  which collectives rank 0 had called by then, and so on for the other ranks
PyTorch's flight recorder has kept these calls. It has its own names for the number of a call
(`collective_seq_id`), its kind (`profiling_name`), the shapes of its tensors (`input_sizes`),
whether it has ended (retired), when it was made (`time_created_ns`) and where (frames).

Write `found(folder)`, which returns a dict:
    "rank"   the number of the rank at fault
    "line"   the number of the line in program.py that makes it differ
    "cause"  what this rank does, as one of these words:
        "batches"    it has more batches than the others
        "left out"   it leaves out a collective that the others call
        "order"      it calls the collectives in a different order
        "shapes"     its tensor has a different shape
        "ended"      its process has ended
        "data"       its data is slow, or does not come
        "computing"  it computes more than the others
        "send"       it sends to the wrong rank
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
