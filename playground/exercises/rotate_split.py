"""Rotary positions in a sequence that is split: each token is rotated by its place in the whole.

Lesson: language/four_axes.py.

Write `rotate_split(heads, tokens)`. A sequence of `tokens` tokens is split between n ranks in
zigzag, as in `transformer/context_parallel.py`. `torch.arange(tokens).tensor_split(2 * n)` has
the places of 2n chunks. Rank r has chunk r, followed by chunk 2n - 1 - r. `heads` are the queries
or keys of this rank's tokens, (N, heads, tokens of this rank, size), in float32 or float64, and
`size` is even.

The function returns them rotated. The numbers i and i + size / 2 of a token are a pair (x, y), for
i from 0 to size / 2 - 1. In a token at place p, the pair becomes

    (x cos(a) - y sin(a), x sin(a) + y cos(a))    with    a = p * 10000 ** (-2 * i / size)

Your answer passes if
- the result is that of a single process which has all tokens, in the same shape and dtype;
- `tokens` may be any number, at least n;
- no rank sends anything.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/rotate_split.py
"""

import torch
import torch.distributed as dist
from check import check


def rotate_split(heads, tokens):
    """Return the queries or keys of this rank's tokens, rotated by their places."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
