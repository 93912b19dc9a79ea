"""Wrong answers to exact_accuracy. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


@torch.no_grad()
def _sums(model, batches):
    """Return the sums over this rank's images: losses, recognized images, images."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for images, labels in batches:
        logits = model(images)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    return totals


def own_images(model, batches):
    """WRONG with 2 ranks, as many images on each rank ... These are the numbers of this rank's own
    images."""
    loss_sum, hits, seen = _sums(model, batches).tolist()
    return loss_sum / seen, hits / seen


def mean_over_ranks(model, batches):
    """WRONG with 2 ranks, batches of ... a rank with fewer images must count less."""
    totals = _sums(model, batches)
    means = totals[:2] / totals[2]
    means /= dist.get_world_size()
    dist.all_reduce(means)
    return means[0].item(), means[1].item()


def mean_over_batches(model, batches):
    """WRONG with 1 rank, batches of ... a smaller batch must count less."""
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        loss_sum, hits, seen = _sums(model, [batch]).tolist()
        totals += torch.tensor([loss_sum / seen, hits / seen, 1])
    dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def sums_over_batches(model, batches):
    """WRONG with 1 rank, as many images on each rank ... [ ... Divide them by the number of
    images."""
    totals = _sums(model, batches)
    dist.all_reduce(totals)
    return totals[0], totals[1]


def divided_on_each_rank(model, batches):
    """CRASH with 2 ranks, no images on the last rank ... ZeroDivisionError ... Add up over the"""
    loss_sum, hits, seen = _sums(model, batches).tolist()
    means = torch.tensor([loss_sum / seen * seen, hits / seen * seen, seen], dtype=torch.float64)
    dist.all_reduce(means)
    return means[0] / means[2], means[1] / means[2]


def not_a_number(model, batches):
    """WRONG with 2 ranks, no images on the last rank ... [nan, nan] ... nothing to divide."""
    totals = _sums(model, batches)
    totals[:2] = totals[:2] / totals[2] * totals[2]
    dist.all_reduce(totals)
    return totals[0] / totals[2], totals[1] / totals[2]


def divided_by_its_own_count(model, batches):
    """WRONG with 2 ranks, as many images on each rank ... divided by this rank's images"""
    totals = _sums(model, batches)
    seen = totals[2].item()
    dist.all_reduce(totals)
    return totals[0] / seen, totals[1] / seen


def in_training_mode(model, batches):
    """WRONG with 1 rank, as many images ... batch norm have changed. Call model.eval() first."""
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for images, labels in batches:
            logits = model(images)
            totals[0] += F.cross_entropy(logits, labels, reduction="sum")
            totals[1] += (logits.argmax(dim=1) == labels).sum()
            totals[2] += len(labels)
    dist.all_reduce(totals)
    return totals[0] / totals[2], totals[1] / totals[2]


def with_autograd(model, batches):
    """WRONG with 1 rank, as many images on each rank ... on expected ... Turn it off with
    torch.no_grad()."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for images, labels in batches:
        logits = model(images)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum").item()
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    return totals[0] / totals[2], totals[1] / totals[2]


def leaves_early(model, batches):
    """HANG with 2 ranks, no images on the last rank ... Rank 1 has no images, but it must call"""
    if not batches:
        return 0.0, 0.0
    totals = _sums(model, batches)
    dist.all_reduce(totals)
    return totals[0] / totals[2], totals[1] / totals[2]


def in_each_batch(model, batches):
    """COSTLY with 1 rank, batches of ... 3 messages; 1 is enough ... a message for each batch?"""
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        sums = _sums(model, [batch])
        dist.all_reduce(sums)
        totals += sums
    return totals[0] / totals[2], totals[1] / totals[2]


def in_each_batch_of_several_ranks(model, batches):
    """HANG with 2 ranks, batches of ... Call collectives after the last batch."""
    totals = torch.zeros(3, dtype=torch.float64)
    for batch in batches:
        sums = _sums(model, [batch])
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        totals += sums
    return totals[0] / totals[2], totals[1] / totals[2]


def three_messages(model, batches):
    """COSTLY with 1 rank, batches of ... 3 messages; 1 is enough ... Put the sums into one"""
    loss_sum, hits, seen = _sums(model, batches)
    for number in (loss_sum, hits, seen):
        dist.all_reduce(number)
    return loss_sum / seen, hits / seen


def the_other_way_round(model, batches):
    """WRONG with 1 rank, as many images on each rank ... Return the mean loss first, then the
    accuracy."""
    totals = _sums(model, batches)
    dist.all_reduce(totals)
    return totals[1] / totals[2], totals[0] / totals[2]
