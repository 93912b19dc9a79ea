"""What DTensor's redistribute() sends: the same matrix, placed differently.

Lesson: split/placements.py.

Write `redistribute(local, old, new)` with the collectives of `collectives.py`, and without DTensor.
`local` is what this rank has of a matrix that is placed as `old`. The function returns what this
rank has of the same matrix when it is placed as `new`. A placement is one of these strings:

    "R"     the whole matrix on each rank
    "S0"    rank r has shard r of the rows
    "S1"    rank r has shard r of the columns
    "P"     each rank has a matrix of the whole size, and their sum is the matrix; only for `old`

The number of ranks n divides the rows and the columns of the matrix, so all shards are equal.

Rung 1 is what the lesson moves: R to S0, S0 to R, P to S0, and P to R. Your answer passes it if
- each rank gets what it has of the matrix with the new placement;
- `local` itself does not change.

Rung 2 is any move. Your answer passes it if
- all of rung 1 holds, with S1, too;
- no rank sends more than it needs to, and nothing if `old` is "R" or the same as `new`. Think of
  S0 to S1 first: which numbers does rank 1 need that rank 0 has?

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/redistribute.py
"""

import torch
import torch.distributed as dist
from check import check


def redistribute(local, old, new):
    """Return what this rank has of a matrix that was placed as `old`, if it is placed as `new`."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
