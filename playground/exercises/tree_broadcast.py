"""A broadcast in rounds: in each round, every rank that has the tensor sends it to one more rank.

Lesson: blocking_p2p.py.

Write `tree_broadcast(tensor)`. Each rank calls it with a tensor of the same shape and dtype. When
it returns, the tensor of every rank has the numbers of rank 0's tensor.

In a round, a rank sends at most one message and receives at most one. If rank 0 alone sends to all
other ranks, n ranks need n - 1 rounds. If each rank that has the tensor already helps, the number
of ranks that have it doubles in each round.

Your answer passes if
- the numbers are right with any number of ranks;
- it takes at most ceil(log2 n) rounds: 1 round for 2 ranks, 2 for 3 and 4 ranks, 3 for 5 to 8;
- only `dist.send` and `dist.recv` are used (or isend and irecv).

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/tree_broadcast.py
"""

import torch
import torch.distributed as dist
from check import check


def tree_broadcast(tensor):
    """Replace the tensor of each rank by that of rank 0."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
