"""Which rank gets which images, in training and in testing, and in which order."""

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler


def per_rank_batches(world_size, epoch, size=60_000, batch=120, seed=0):
    """Return each rank's batches of an epoch, as lists of indices, as the lessons make them."""
    ranks = []
    for rank in range(world_size):
        sampler = DistributedSampler(range(size), world_size, rank, seed=seed, drop_last=True)
        sampler.set_epoch(epoch)
        ranks.append(list(BatchSampler(sampler, batch // world_size, drop_last=True)))
    return ranks


def global_batches(epoch, size=60_000, batch=120, seed=0):
    """Return the batches of single_gpu.py."""
    order = torch.Generator().manual_seed(seed + epoch)
    return list(BatchSampler(RandomSampler(range(size), generator=order), batch, drop_last=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [60_000, 59_999, 1_500, 1_499])
def test_the_batches_of_all_ranks_make_up_the_global_batch(world_size, size):
    """In every step of every epoch, the batches of all ranks together are the batch of one process.

    Each image occurs once in an epoch.
    """
    for epoch in (0, 1):
        batches = global_batches(epoch, size)
        ranks = per_rank_batches(world_size, epoch, size)
        assert {len(rank) for rank in ranks} == {len(batches)}
        for step, batch in enumerate(batches):
            together = sum([rank[step] for rank in ranks], [])
            assert sorted(together) == sorted(batch)
        seen = sum(batches, [])
        assert len(seen) == len(set(seen)) == size // 120 * 120


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("size", [10_000, 297])
def test_each_test_image_counts_once(world_size, size):
    """No test image is repeated, even if the world size does not divide their number.

    The lessons do not use DistributedSampler for testing, because it would repeat some.
    """
    indices = []
    padded = 0
    for rank in range(world_size):
        indices += range(rank, size, world_size)
        padded += len(DistributedSampler(range(size), world_size, rank, shuffle=False))
    assert sorted(indices) == list(range(size))
    assert (padded > size) == (size % world_size > 0)


def test_set_epoch_changes_the_order():
    """The order differs from epoch to epoch, and it is the same in each run.

    Without set_epoch every epoch has the same order.
    """
    first = per_rank_batches(2, 0)
    assert first != per_rank_batches(2, 1)
    assert first == per_rank_batches(2, 0)
    sampler = DistributedSampler(range(100), 2, 0, seed=0)
    assert list(sampler) == list(sampler)
