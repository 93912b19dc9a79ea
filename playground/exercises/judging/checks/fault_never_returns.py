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


def explain(outcome):
    """Put typical mistakes into words."""
    if outcome.verdict == "HANG":
        return explain_hang(outcome.messages)
    size = outcome.world_size
    hits = outcome.case["hits"][:size]
    lengths = outcome.case["lengths"][:size]
    actual = outcome.results[outcome.rank]
    if outcome.rank > 0:
        return "Only rank 0 should return the accuracy."
    if actual is None:
        return "Rank 0 should return the accuracy."
    if not isinstance(actual, (int, float, torch.Tensor)):
        return None
    accuracies = [hit / length for hit, length in zip(hits, lengths, strict=True) if length]
    called = [len(mine) for mine in outcome.messages]
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
