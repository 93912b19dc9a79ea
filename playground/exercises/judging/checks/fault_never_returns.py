"""How fault_never_returns is checked."""

import torch
import torch.distributed as dist

NAME = "test"
IMITATED = True
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


def run(test, lengths, hits):
    rank = dist.get_rank()
    images = torch.tensor([[0.0, 1.0]]).repeat(lengths[rank], 1)
    labels = torch.zeros(lengths[rank], dtype=torch.int64)
    labels[: hits[rank]] = 1  # the model recognizes these
    return test(torch.nn.Identity(), images, labels)


def expected(rank, world_size, lengths, hits):
    if rank > 0:
        return None
    return sum(hits[:world_size]) / sum(lengths[:world_size])


def test(model, images, labels):
    """Why: all_reduce is a collective: every rank calls it, even if only rank 0 needs the sum."""
    with torch.no_grad():
        predictions = model(images).argmax(dim=1)
    hits = (predictions == labels).sum().item()
    # NCCL cannot send CPU tensors.
    counts = torch.tensor([hits, len(labels)], device=labels.device)
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        all_hits, all_images = counts.tolist()
        return all_hits / all_images
    return None


SEVERAL = "WRONG.*rank [1-9] has"
WORDS = {
    "HANG": "All ranks must call the same collectives in the same order.",
    "WRONG.*rank 0 has None": "Rank 0 should return the accuracy.",
    SEVERAL: "Only rank 0 should return the accuracy.",
}
REDUCE = "    dist.all_reduce(counts)\n"
IF_FIRST = "    if dist.get_rank() == 0:\n"
MISTAKES = {
    WORDS["HANG"]: (*(REDUCE + IF_FIRST, f"{IF_FIRST}    {REDUCE}"),),
    "This is the accuracy on rank 0's own images.": (REDUCE, ""),
    "This is the mean of the ranks' accuracies. But the ranks have unequal parts.": (
        *("[hits, len(labels)]", "[hits / max(len(labels), 1), 1]"),
    ),
    "The hits are those of all ranks, but the images are those of rank 0.": (
        *("dist.all_reduce(counts)", "dist.all_reduce(counts[:1])"),
    ),
    WORDS[SEVERAL]: (IF_FIRST, "    if True:\n"),
}
