"""Wrong repairs of fault_too_many_images. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler


def _test(model, dataset, sampler):
    """Test this rank's part, as the exercise does. Returns the counts of all ranks."""
    counts = torch.zeros(2, dtype=torch.int64)
    for images, labels in DataLoader(dataset, batch_size=4, sampler=sampler):
        counts[0] += (model(images).argmax(dim=1) == labels).sum()
        counts[1] += len(labels)
    dist.all_reduce(counts)
    return counts


def leaves_out_the_rest(model, dataset):
    """WRONG with 2 ranks, 11 images ... image 10 of 11 is not read"""
    sampler = DistributedSampler(dataset, shuffle=False, drop_last=True)
    return _test(model, dataset, sampler).tolist()


def rounded_up(model, dataset):
    """CRASH with 2 ranks, 11 images ... there is no image 11: the last one is 10"""
    part = -(-len(dataset) // dist.get_world_size())
    start = dist.get_rank() * part
    return _test(model, dataset, range(start, start + part)).tolist()


def right_number_of_images(model, dataset):
    """WRONG with 2 ranks, 11 images ... image 0 is read on ranks 0 and 1 ... 9 hits are counted"""
    hits, _ = _test(model, dataset, DistributedSampler(dataset, shuffle=False)).tolist()
    return [hits, len(dataset)]


def every_rank_tests_all(model, dataset):
    """WRONG with 2 ranks, 11 images ... every rank reads all images ... The counts are right,"""
    counts = _test(model, dataset, None)
    return (counts // dist.get_world_size()).tolist()


def rank_0_tests_all(model, dataset):
    """WRONG with 2 ranks, 11 images ... rank 0 reads 11 images, and rank 1 reads 0 ... Each"""
    return _test(model, dataset, range(len(dataset)) if dist.get_rank() == 0 else []).tolist()


def last_ranks_have_few(model, dataset):
    """WRONG with 5 ranks, 11 images ... rank 0 reads 3 images, and rank 4 reads 0 ... the numbers
    of images differ by at most one
    """
    part = -(-len(dataset) // dist.get_world_size())
    start = dist.get_rank() * part
    indices = range(start, min(start + part, len(dataset)))
    return _test(model, dataset, indices).tolist()


def not_added_up(model, dataset):
    """WRONG with 2 ranks, 11 images ... hits and images ... 6 images are counted, and 11 are"""
    counts = torch.zeros(2, dtype=torch.int64)
    sampler = range(dist.get_rank(), len(dataset), dist.get_world_size())
    for images, labels in DataLoader(dataset, batch_size=4, sampler=sampler):
        counts[0] += (model(images).argmax(dim=1) == labels).sum()
        counts[1] += len(labels)
    return counts.tolist()


def last_batch_dropped(model, dataset):
    """WRONG with 1 rank, 11 images ... hits and images ... 8 images are counted, and 11 are read"""
    counts = torch.zeros(2, dtype=torch.int64)
    sampler = range(dist.get_rank(), len(dataset), dist.get_world_size())
    for images, labels in DataLoader(dataset, batch_size=4, sampler=sampler):
        if len(labels) == 4:
            counts[0] += (model(images).argmax(dim=1) == labels).sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    return counts.tolist()
