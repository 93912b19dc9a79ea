"""How split_cross_entropy is checked."""

import torch
import torch.distributed as dist
from judging.traffic import sent_bytes
from torch.nn import functional as F

CASES = {
    "4 words on each rank": {"more": 0},
    "ranks with different numbers of words, float64": {"more": 2, "dtype": torch.float64},
    "large scores": {"more": 1, "scale": 200.0},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
TOKENS = 10
HINTS = """
The loss has two terms. One is a sum over all words, so over the ranks, too. The other one is a
score that a single rank has. What must the other ranks add to it? And exp() of a large score
overflows: which number can be subtracted from all scores without changing the loss?

dist.all_reduce(tensor, dist.ReduceOp.MAX) leaves the largest numbers of all ranks.
scores.gather(1, columns[:, None]) reads one column of each row. torch.where(own, ..., 0) keeps what
belongs to a rank. torch.stack lets two sums travel together.

largest = the largest score of each token, over all ranks
scores = scores - largest
total = the sum of exp(scores), added up over the ranks
of_label = the score of the label on the rank that has it, 0 elsewhere, added up over the ranks
return log(total) - of_label
"""


def whole(world_size, more, dtype=torch.float32, scale=1.0):
    """Return all scores, the labels, and how many words each rank has."""
    counts = [4 + more * rank for rank in range(world_size)]
    generator = torch.Generator().manual_seed(world_size)
    scores = torch.randn(TOKENS, sum(counts), generator=generator).to(dtype) * scale
    labels = torch.randint(sum(counts), (TOKENS,), generator=generator)
    return scores, labels, counts


def run(split_cross_entropy, rank, world_size, **case):
    scores, labels, counts = whole(world_size, **case)
    return split_cross_entropy(scores.split(counts, dim=1)[rank], labels, sum(counts[:rank]))


def expected(rank, world_size, **case):
    scores, labels, _ = whole(world_size, **case)
    return F.cross_entropy(scores, labels, reduction="none")


def limits(rank, world_size, more, dtype=torch.float32, scale=1.0):
    return {"bytes": sent_bytes("all_reduce", 3 * TOKENS * dtype.itemsize, world_size)}


def split_cross_entropy(scores, labels, first):
    """Why: ranks add up their parts of both terms, after all have subtracted the same number."""
    largest = scores.amax(dim=1)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    scores = scores - largest[:, None]
    column = labels - first
    own = (column >= 0) & (column < scores.shape[1])
    read = scores.gather(1, torch.where(own, column, 0)[:, None])[:, 0]
    of_label = torch.where(own, read, 0)
    sums = torch.stack([scores.exp().sum(dim=1), of_label])
    dist.all_reduce(sums)
    total, of_label = sums
    return total.log() - of_label


MAX = "    dist.all_reduce(largest, dist.ReduceOp.MAX)\n"
WORDS = {
    r"WRONG, large scores.*has \[[^]]*(nan|inf)": "exp() is inf for a word, or 0 for all. Subtract "
    "each token's largest score of all ranks first.",
    "COSTLY": "The scores can stay where they are. The other ranks need the largest one, a sum of "
    "exponentials, and the score of the label.",
    "CRASH.*(index|bounds)": "A label may be the word of another rank. Then these scores have no "
    "column for it.",
}
OVERFLOW, COSTLY, NO_COLUMN = WORDS.values()
MISTAKES = {
    OVERFLOW: (MAX, "    largest.zero_()\n"),
    COSTLY: (MAX, f"{MAX}    dist.all_reduce(scores.clone())\n"),
    NO_COLUMN: ("torch.where(own, column, 0)", "column"),
    "It differs by about 13% from what is expected.": (MAX, ""),
    "The ranks should have the same numbers": ("    dist.all_reduce(sums)\n", ""),
    "It is about 0.86 times what is expected": (
        *("labels - first", "labels - dist.get_rank() * scores.shape[1]"),
    ),
}
