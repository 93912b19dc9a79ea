"""The gradient of the mean over all tokens, if the ranks have different numbers of tokens.

Lesson: language/token_mean.py.

Write `token_mean(model, micro_batches)`. Each rank has micro-batches of its own, a list of pairs
(rows, labels), both int64 (N, tokens). Short texts are padded, and padding has the label -100.
`model(rows)` returns scores, (N, words, tokens), as `F.cross_entropy` takes them. The model is
wrapped by DDP, which averages gradients over the ranks. Its gradients are None. All ranks have the
same number of micro-batches, at least one.

The function runs `forward()` and `backward()` for each micro-batch in turn. Afterwards each
`parameter.grad` is the gradient of the mean loss of all tokens. These are the tokens of all
micro-batches of all ranks, without padding.

Your answer passes if
- the gradients are right on all ranks, however many tokens each micro-batch has;
- a micro-batch may have nothing but padding, as long as there is a token on some rank;
- in addition to what DDP sends, each rank sends one message.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/token_mean.py
"""

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def token_mean(model, micro_batches):
    """Compute the gradient of the mean over the tokens of all micro-batches of all ranks."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
