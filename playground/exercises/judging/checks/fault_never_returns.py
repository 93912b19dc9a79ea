"""How fault_never_returns is checked."""

import torch

NAME = "test"
FAULT = "HANG with 2 ranks, parts of different length ... rank 0 waits at your line ... all_reduce"
CASES = {
    "parts of different length": {"lengths": (7, 4, 9, 5, 6), "hits": (6, 1, 7, 2, 3)},
    "images on rank 0 only": {"lengths": (8, 0, 0, 0, 0), "hits": (5, 0, 0, 0, 0)},
    "no images on rank 1": {"lengths": (3, 0, 5, 4, 1), "hits": (1, 0, 4, 3, 0)},
}
HINTS = """
Rank 0 waits. For which call of the other ranks does it wait, and do they come to such a call?

dist.all_reduce is a collective, so every rank must call it. dist.reduce(counts, dst=0) would do,
too: every rank must also call it, but only rank 0 gets the sum.

counts = this rank's hits and images
add up the counts over all ranks
if this is rank 0: return the accuracy
return None
"""


def run(test, rank, world_size, lengths, hits):
    images = torch.tensor([[0.0, 1.0]]).repeat(lengths[rank], 1)
    labels = torch.zeros(lengths[rank], dtype=torch.int64)
    labels[: hits[rank]] = 1  # the model recognizes these
    return test(torch.nn.Identity(), images, labels)


def expected(rank, world_size, lengths, hits):
    if rank > 0:
        return None
    return sum(hits[:world_size]) / sum(lengths[:world_size])


REPAIR = (
    "    if dist.get_rank() == 0:\n        dist.all_reduce(counts)\n",
    "    dist.all_reduce(counts)\n    if dist.get_rank() == 0:\n",
)
WHY = "all_reduce is a collective: every rank calls it, even if only rank 0 needs the sum."
WORDS = {
    "WRONG.*rank 0 has None": "Rank 0 should return the accuracy.",
    "WRONG.*rank [1-9] has": "Only rank 0 should return the accuracy.",
}
MISTAKES = {
    "rank 0 has 0.857": ("    dist.all_reduce(counts)\n", ""),
    "Only rank 0 should return the accuracy.": ("if dist.get_rank() == 0:", "if True:"),
}
