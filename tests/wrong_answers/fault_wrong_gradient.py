"""Wrong repairs of fault_wrong_gradient. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _sum_over_ranks(number):
    """Return the sum of a number over the ranks."""
    total = torch.tensor(float(number))
    dist.all_reduce(total)
    return total.item()


def _train(model, images, labels, steps, factor, reduction="sum"):
    """Train with the sum of the ranks' gradients times a factor."""
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(images), labels, reduction=reduction).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * factor * parameter.grad


def not_divided(model, images, labels, steps):
    """WRONG with 1 rank, 1 step ... This is the sum over all images. What must it be"""
    _train(model, images, labels, steps, 1)


def sum_of_means(model, images, labels, steps):
    """WRONG with 2 ranks, 1 step ... This is the sum of the ranks' gradients. What must it be"""
    _train(model, images, labels, steps, 1, "mean")


def divided_by_the_ranks(model, images, labels, steps):
    """WRONG with 2 ranks ... This is the sum over all images, divided by the number of ranks."""
    images_here = len(labels) if dist.get_world_size() == 1 else 1
    _train(model, images, labels, steps, 1 / dist.get_world_size() / images_here)


def divided_by_both(model, images, labels, steps):
    """WRONG with 2 ranks, 1 step ... This is 2 times too small: divided by the images and by the"""
    total = _sum_over_ranks(len(labels))
    _train(model, images, labels, steps, 1 / total / dist.get_world_size())


def as_if_all_had_the_same(model, images, labels, steps):
    """WRONG with 2 ranks, 1 step ... This is the result if each rank had 6 images."""
    longest = torch.tensor(len(labels))
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    _train(model, images, labels, steps, 1 / longest.item() / dist.get_world_size())


def leaves_out_an_empty_rank(model, images, labels, steps):
    """CRASH with 2 ranks, no images on some ranks ... A parameter has no gradient until"""
    total = _sum_over_ranks(len(labels))
    for _ in range(steps):
        model.zero_grad()
        if len(labels) > 0:
            F.cross_entropy(model(images), labels, reduction="sum").backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad / total


def an_empty_rank_takes_no_part(model, images, labels, steps):
    """HANG with 2 ranks, no images on some ranks ... rank 1 has finished"""
    total = _sum_over_ranks(len(labels))
    if len(labels) > 0:
        _train(model, images, labels, steps, 1 / total)


def own_gradients(model, images, labels, steps):
    """WRONG with 2 ranks, 1 step ... This is the step with this rank's own gradient only."""
    for _ in range(steps):
        model.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
