"""An all-gather: each rank gets the chunks of all ranks.

Lesson: collectives.py.

Write `all_gather(chunk)`. Each rank calls it with a chunk of its own. All chunks have the same
length. The function returns a new tensor with the chunks of all ranks, in the order of the ranks.

Your answer passes if
- the numbers are right with any number of ranks, and for any dtype;
- only all_to_all, send, recv, isend and irecv are used;
- each rank sends at most n - 1 chunks, for n ranks.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/all_gather.py
"""

import torch
import torch.distributed as dist
from check import check


def all_gather(chunk):
    """Return the chunks of all ranks one after another, as a new tensor with one axis."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
