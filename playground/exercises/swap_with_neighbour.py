"""Two neighbours swap their tensors, and no rank waits for ever.

Lesson: blocking_p2p.py.

Write `swap_with_neighbour(tensor)`. Ranks 0 and 1 are neighbours, then 2 and 3, then 4 and 5, and
so on. Each rank calls it with a tensor of its own. All of these have the same shape and dtype. It
returns the tensor of the neighbour. If the number of ranks is odd, the last rank has no neighbour,
so it gets its own tensor back.

Your answer passes if
- each rank gets the right numbers, with any number of ranks, and for any dtype;
- `tensor` itself does not change;
- each rank that has a neighbour sends one message;
- only send, recv, isend and irecv are used.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/swap_with_neighbour.py
"""

import torch
import torch.distributed as dist
from check import check


def swap_with_neighbour(tensor):
    """Return the neighbour's tensor. The last of an odd number of ranks returns its own."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
