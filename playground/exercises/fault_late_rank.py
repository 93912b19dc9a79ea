"""Read the evidence: one rank is late.

Lesson: replicated/profile_steps.py.

A program ran on four ranks of one machine. Its model is tiny, but it was slow on all ranks. The
folder `playground/exercises/evidence/late_rank/` has
    program.py      the program. Each rank has called train()
    log.txt         what the ranks have printed
    stack0.txt      where rank 0 was in the middle of the run, and so on for the other ranks
    recorder0.json  which collectives rank 0 had called by then, and so on for the other ranks
PyTorch's flight recorder has kept these calls. It has its own names for the number of a call
(`collective_seq_id`), its kind (`profiling_name`), the shapes of its tensors (`input_sizes`),
whether it has ended (retired), when it was made (`time_created_ns`) and where (frames).

Write `found(folder)`, which returns a dict:
    "rank"   the number of the rank at fault
    "line"   the number of the line in program.py at which it loses its time
    "cause"  what this rank does, as one of these words:
        "batches"    it has more batches than the others
        "left out"   it leaves out a collective that the others call
        "order"      it calls the collectives in a different order
        "shapes"     its tensor has a different shape
        "ended"      its process has ended
        "data"       its data is slow, or does not come
        "computing"  it computes more than the others
        "send"       it sends to the wrong rank
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
