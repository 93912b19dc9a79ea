"""Wrong answers to accumulate_gradients. See test_exercises.py for the docstrings."""

from contextlib import nullcontext

import torch.distributed as dist
from torch.nn import functional as F


def _parts(images, labels, count):
    """Return the micro-batches."""
    count = min(count, len(labels))
    return list(zip(images.tensor_split(count), labels.tensor_split(count), strict=True))


def _accumulate(model, parts, weight):
    """Add up the gradients of micro-batches. weight(labels) is how much a micro-batch counts."""
    for number, (images, labels) in enumerate(parts, start=1):
        with model.no_sync() if number < len(parts) else nullcontext():
            (F.cross_entropy(model(images), labels) * weight(labels)).backward()


def without_a_weight(model, images, labels, count):
    """WRONG with 1 rank, 8 images in 4 ... Multiply it by the micro-batch's fraction"""
    _accumulate(model, _parts(images, labels, count), lambda part: 1)


def divided_by_count(model, images, labels, count):
    """WRONG with 1 rank, 7 images in 3 ... a smaller one must count less."""
    parts = _parts(images, labels, count)
    _accumulate(model, parts, lambda part: 1 / len(parts))


def drops_the_last_images(model, images, labels, count):
    """WRONG with 1 rank, 7 images in 3 ... The last images are missing"""
    size = max(1, len(labels) // count)
    parts = list(zip(images.split(size), labels.split(size), strict=True))[:count]
    _accumulate(model, parts, lambda part: 1 / len(parts))


def never_in_sync(model, images, labels, count):
    """WRONG with 2 ranks, 8 images in 4 ... Is the last micro-batch in no_sync()?"""
    with model.no_sync():
        for part, part_labels in _parts(images, labels, count):
            loss = F.cross_entropy(model(part), part_labels)
            (loss * len(part_labels) / len(labels)).backward()


def chunk_makes_fewer(model, images, labels, count):
    """WRONG with 2 ranks, 6 images in 4 ... not averaged over the ranks."""
    parts = zip(images.chunk(count), labels.chunk(count), strict=True)
    for number, (part, part_labels) in enumerate(parts, start=1):
        with model.no_sync() if number < count else nullcontext():
            loss = F.cross_entropy(model(part), part_labels)
            (loss * len(part_labels) / len(labels)).backward()


def zero_grad_in_between(model, images, labels, count):
    """WRONG with 1 rank, 8 images in 4 ... Only the last micro-batch counts."""
    for part, part_labels in _parts(images, labels, count):
        model.zero_grad()
        loss = F.cross_entropy(model(part), part_labels)
        (loss * len(part_labels) / len(labels)).backward()


def in_one_piece(model, images, labels, count):
    """WRONG with 1 rank, 8 images in 4 ... images in the largest micro-batch: 8"""
    F.cross_entropy(model(images), labels).backward()


def one_backward(model, images, labels, count):
    """WRONG with 1 rank, 8 images in 4 ... in memory at a time: 4 ... Call backward() for each"""
    total = 0
    parts = _parts(images, labels, count)
    for number, (part, part_labels) in enumerate(parts, start=1):
        with model.no_sync() if number < len(parts) else nullcontext():
            loss = F.cross_entropy(model(part), part_labels)
            total += loss * len(part_labels) / len(labels)
    total.backward()


def without_no_sync(model, images, labels, count):
    """COSTLY with 1 rank, 7 images in 3 ... 3 times the bytes Is each forward() but the last one"""
    for part, part_labels in _parts(images, labels, count):
        loss = F.cross_entropy(model(part), part_labels)
        (loss * len(part_labels) / len(labels)).backward()


def forward_outside(model, images, labels, count):
    """COSTLY with 1 rank, 7 images in 3 ... inside no_sync(), with its backward()?"""
    parts = _parts(images, labels, count)
    for number, (part, part_labels) in enumerate(parts, start=1):
        loss = F.cross_entropy(model(part), part_labels)
        with model.no_sync() if number < len(parts) else nullcontext():
            (loss * len(part_labels) / len(labels)).backward()


def averaged_twice(model, images, labels, count):
    """COSTLY with 1 rank, 7 images in 3 ... already averages the gradients in the last"""
    parts = _parts(images, labels, count)
    _accumulate(model, parts, lambda part: len(part) / len(labels))
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def stays_without_sync(model, images, labels, count):
    """WRONG with 2 ranks, 8 images in 4 ... call 2 ... What is left behind for the next one?"""
    _accumulate(model, _parts(images, labels, count), lambda part: len(part) / len(labels))
    model.require_backward_grad_sync = False
    model.no_sync = nullcontext


def keeps_the_graphs(model, images, labels, count):
    """WRONG with 1 rank, 8 images in 4 ... memory at a time: 8 ... unless backward() gets retain"""
    losses = []
    parts = _parts(images, labels, count)
    for number, (part, part_labels) in enumerate(parts, start=1):
        with model.no_sync() if number < len(parts) else nullcontext():
            loss = F.cross_entropy(model(part), part_labels) * len(part_labels) / len(labels)
            loss.backward(retain_graph=True)
            losses.append(loss)


def empty_micro_batches(model, images, labels, count):
    """WRONG with 1 rank, 3 images in 5 ... empty micro-batches: 4 ... into fewer micro-batches"""
    parts = list(zip(images.tensor_split(count), labels.tensor_split(count), strict=True))
    for number, (part, part_labels) in enumerate(parts, start=1):
        with model.no_sync() if number < len(parts) else nullcontext():
            loss = F.cross_entropy(model(part), part_labels, reduction="sum") / len(labels)
            loss.backward()


def a_message_for_each_parameter(model, images, labels, count):
    """COSTLY with 1 rank, 7 images in 3 ... rank 0 makes the calls of 8 messages; 6 are enough DDP
    puts many gradients into one message if you call model(...)"""
    parts = _parts(images, labels, count)
    for part, part_labels in parts:
        loss = F.cross_entropy(model.module(part), part_labels)
        (loss * len(part_labels) / len(labels)).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
