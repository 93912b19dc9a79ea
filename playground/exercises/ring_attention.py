"""Attention whose tokens are on several ranks: keys and values travel around a ring.

Lesson: transformer/context_parallel.py.

Write `ring_attention(query, key, value, places)`. Each rank has the queries, keys and values of its
own tokens, each of the shape (N, heads, tokens of this rank, size). places[r] has the places of
rank r's tokens in the sequence, in ascending order: a LongTensor with at least one place. The
function returns what this rank's tokens read, in the shape of `query`.

Attention is causal: a token reads from itself and from all tokens with a lower place, on all ranks.
The score of a query and a key is their product, divided by the square root of `size`. The result is
the mean of the values, weighted with exp(score). Only the forward pass is needed. You may compute
masked pairs, too.

Your answer passes if
- the result is that of a single process which has all tokens;
- ranks may have different numbers of tokens, and scores may be so large that exp() overflows;
- the ranks form a ring, and in each of n - 1 steps, a rank sends the keys and the values that it
  has received before. No rank sends more.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/ring_attention.py
"""

import torch
import torch.distributed as dist
from check import check


def ring_attention(query, key, value, places):
    """Return what this rank's tokens read from the tokens of all ranks."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
