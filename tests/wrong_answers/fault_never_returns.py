"""Wrong repairs of fault_never_returns. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _counts(model, images, labels):
    """Return this rank's hits and images as a tensor."""
    hits = (model(images).argmax(dim=1) == labels).sum().item()
    return torch.tensor([hits, len(labels)])


def rank_0_alone(model, images, labels):
    """WRONG with 2 ranks ... The counts of the others are missing."""
    hits, length = _counts(model, images, labels).tolist()
    return hits / length if dist.get_rank() == 0 else None


def not_waited_for(model, images, labels):
    """WRONG with 2 ranks ... Is the sum read before it is ready?"""
    counts = _counts(model, images, labels)
    if dist.get_rank() == 0:
        dist.all_reduce(counts, async_op=True)
        hits, length = counts.tolist()
        return hits / length
    return None


def another_collective_on_the_others(model, images, labels):
    """HANG with 2 ranks ... Rank 0 has called: all_reduce. Rank 1 has called: barrier."""
    counts = _counts(model, images, labels)
    if dist.get_rank() == 0:
        dist.all_reduce(counts)
        hits, length = counts.tolist()
        return hits / length
    dist.barrier()
    return None


def once_more_on_rank_0(model, images, labels):
    """HANG with 2 ranks ... Rank 0 has called: all_reduce, all_reduce. Rank 1"""
    counts = _counts(model, images, labels)
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        dist.all_reduce(counts)
        hits, length = counts.tolist()
        return hits / length
    return None


def with_a_barrier_before(model, images, labels):
    """HANG with 2 ranks ... Rank 0 has called: barrier, all_reduce. Rank 1 has"""
    counts = _counts(model, images, labels)
    dist.barrier()
    if dist.get_rank() == 0:
        dist.all_reduce(counts)
        hits, length = counts.tolist()
        return hits / length
    return None


def mean_of_accuracies(model, images, labels):
    """WRONG with 2 ranks ... This is the mean of the ranks' accuracies."""
    hits, length = _counts(model, images, labels).tolist()
    accuracy = torch.tensor(hits / max(length, 1))
    dist.all_reduce(accuracy)
    return (accuracy / dist.get_world_size()).item() if dist.get_rank() == 0 else None


def hits_only(model, images, labels):
    """WRONG with 2 ranks ... The hits are those of all ranks, but the images are those of rank"""
    counts = _counts(model, images, labels)
    dist.all_reduce(counts[:1])
    return (counts[0] / counts[1]).item() if dist.get_rank() == 0 else None


def on_every_rank(model, images, labels):
    """WRONG with 2 ranks ... Only rank 0 should return the accuracy."""
    counts = _counts(model, images, labels)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()
