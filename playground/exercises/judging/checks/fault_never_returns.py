"""How fault_never_returns is checked."""

import torch
import torch.distributed as dist

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


def run(test, lengths, hits):
    """Call the learner's function on this rank."""
    rank = dist.get_rank()
    images = torch.tensor([[0.0, 1.0]]).repeat(lengths[rank], 1)
    labels = torch.zeros(lengths[rank], dtype=torch.int64)
    labels[: hits[rank]] = 1  # the model recognizes these
    return test(torch.nn.Identity(), images, labels)


def expected(rank, world_size, lengths, hits):
    """Return what run() should return."""
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


def explain(trial):
    """Put typical mistakes into words."""
    if trial.verdict == "HANG":
        return explain_hang(trial.messages)
    size = trial.world_size
    hits = trial.case["hits"][:size]
    lengths = trial.case["lengths"][:size]
    actual = trial.results[trial.rank]
    if trial.rank > 0:
        return "Only rank 0 should return the accuracy."
    if actual is None:
        return "Rank 0 should return the accuracy."
    if not isinstance(actual, (int, float, torch.Tensor)):
        return None
    accuracies = [hit / length for hit, length in zip(hits, lengths, strict=True) if length]
    called = [len(mine) for mine in trial.messages]
    if close(actual, hits[0] / lengths[0]):
        if called[0] and not any(called[1:]):
            return (
                "This is the accuracy on rank 0's own images. Is the sum read before it is ready?"
            )
        return "This is the accuracy on rank 0's own images. The counts of the others are missing."
    if close(actual, sum(accuracies) / size):
        return "This is the mean of the ranks' accuracies. But the ranks have unequal parts."
    if close(actual, sum(hits) / lengths[0]):
        return "The hits are those of all ranks, but the images are those of rank 0."
    return None


def close(number, other):
    """Return whether two accuracies are equal, up to rounding."""
    return abs(number - other) < 1e-6


def explain_hang(messages):
    """Say what rank 0 and rank 1 have called."""
    calls = []
    for mine in messages:
        calls.append(", ".join(message.call for message in mine) or "nothing")
    return f"Rank 0 has called: {calls[0]}. Rank 1 has called: {calls[1]}."


REDUCE = "    dist.all_reduce(counts)\n"
IF_FIRST = "    if dist.get_rank() == 0:\n"
MISTAKES = {
    "Rank 0 has called: all_reduce. Rank 1 has called: nothing.": (
        *(REDUCE + IF_FIRST, f"{IF_FIRST}    {REDUCE}"),
    ),
    "The counts of the others are missing.": (REDUCE, ""),
    "Is the sum read before it is ready?": (
        *(REDUCE + IF_FIRST, f"{IF_FIRST}        dist.all_reduce(counts, async_op=True)\n"),
    ),
    "This is the mean of the ranks' accuracies. But the ranks have unequal parts.": (
        *("[hits, len(labels)]", "[hits / max(len(labels), 1), 1]"),
    ),
    "The hits are those of all ranks, but the images are those of rank 0.": (
        *("dist.all_reduce(counts)", "dist.all_reduce(counts[:1])"),
    ),
    "Only rank 0 should return the accuracy.": (IF_FIRST, "    if True:\n"),
}
