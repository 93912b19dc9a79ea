"""The loss of scores that no rank has all of: the vocabulary is split between the ranks.

Lesson: transformer/vocabulary_parallel.py.

Write `split_cross_entropy(scores, labels, first)`. Each rank calls it with
- scores: (tokens, words of this rank). Column c has the scores of word `first + c`;
- labels: int64 (tokens,), the same on all ranks. A label may be any rank's word;
- first:  the number of this rank's first word. Rank 0 has the first words, and so on.

With s for the scores of all words, and y for the label, a token has the loss

    log(sum_j exp(s_j)) - s_y

The function returns the loss of each token, (tokens,), on all ranks. Only the forward pass is
needed.

Your answer passes if
- the losses are right, in float32 and float64, and the ranks may have different numbers of words;
- the scores may be so large that exp() overflows;
- no rank sends more than three numbers for each token, by all_reduce.

The first check copies this file to `playground/exercises/answers/`. Write in the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/split_cross_entropy.py
"""

import torch
import torch.distributed as dist
from check import check


def split_cross_entropy(scores, labels, first):
    """Return the loss of each token, (tokens,), from the scores of all ranks' words."""
    raise NotImplementedError("your turn")


if __name__ == "__main__":
    check(__file__)
