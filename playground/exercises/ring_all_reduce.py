"""An all-reduce in a ring.

Lesson: nonblocking_p2p.py.

Write `ring_all_reduce(tensor)`. Each rank calls it with a contiguous tensor of its own, which may
have several axes. All of these have the same shape and dtype. When it returns, the tensor of every
rank is the sum over all ranks.

Rung 1 is a tensor with one axis, whose length is a multiple of n, for n ranks. Your answer passes
it if
- the sums are right;
- only messages between two ranks are used: `batch_isend_irecv`, isend, irecv, send or recv.

Rung 2 is any length and any shape. Your answer passes it if
- the sums are right, even if there are more ranks than numbers;
- each rank sends at most 2(n-1) messages of at most ceil(S/n) numbers, for S numbers.

On GPUs, use `batch_isend_irecv`: with NCCL, the messages of two ranks share one communicator and
run in order, so both ranks could wait for ever if both send first.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/ring_all_reduce.py
"""

import torch
import torch.distributed as dist
from check import check


def ring_all_reduce(tensor):
    """Replace a contiguous tensor by its sum over all ranks."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
