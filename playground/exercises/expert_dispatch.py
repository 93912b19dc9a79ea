"""Send each token to the rank of its expert, and bring back what the expert computes.

Lesson: transformer/expert_parallel.py.

Write `expert_dispatch(tokens, expert, experts)`. Each rank calls it with
- tokens:  (T, width), the tokens of this rank. T may differ from rank to rank, and may be 0;
- expert:  int64 (T,), the number of each token's expert, counted over all ranks;
- experts: a list of this rank's experts. Each is a function that turns (N, width) into (N, width).

All ranks have the same number of experts. With 2 on each rank, rank 0 has the experts 0 and 1, rank
1 has 2 and 3, and so on. The function returns (T, width): row i is what the expert of token i has
computed of it.

Your answer passes if
- the outputs are right on all ranks, also on those without tokens, and for any dtype;
- after `backward()`, the tokens have their gradients, and so have the parameters of the experts;
- no rank sends more than its tokens, their outputs, the gradients of both, and some counts.

A check calls `backward()` on all ranks, so all ranks must get there.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/expert_dispatch.py
"""

import torch
import torch.distributed as dist
from check import check


def expert_dispatch(tokens, expert, experts):
    """Return what the experts compute of the tokens, (T, width), in the order of the tokens."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
