"""A reduce-scatter: each rank gets its chunk of the sum over all ranks.

Lesson: collectives.py.

Write `reduce_scatter(tensor)`. Each rank calls it with a tensor of its own. All of these have the
same length. The length is a multiple of the number of ranks n, so the tensor has n chunks of the
same length. It returns a new tensor: rank r gets chunk r of the sum over all ranks.

Your answer passes if
- the sums are right with any number of ranks, and for any dtype;
- `tensor` itself does not change;
- only all_to_all, send, recv, isend and irecv are used;
- each rank sends at most n - 1 chunks: each of the other ranks needs one of its chunks.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/reduce_scatter.py
"""

import torch
import torch.distributed as dist
from check import check


def reduce_scatter(tensor):
    """Return this rank's chunk of the sum over all ranks, as a new tensor with one axis."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
