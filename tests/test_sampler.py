"""Who sees which image: the shares of a batch, the test images, the order of the epochs."""

import pytest
import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler


def shares(world_size, epoch, size=60_000, batch=None, seed=0):
    """Return each rank's local batches of an epoch as the lessons make them: a list of lists of indices."""
    ranks = []
    for rank in range(world_size):
        sampler = DistributedSampler(range(size), world_size, rank, seed=seed, drop_last=True)
        sampler.set_epoch(epoch)
        ranks.append(list(BatchSampler(sampler, (batch or 120) // world_size, drop_last=True)))
    return ranks


def single(epoch, size=60_000, batch=120, seed=0):
    """Return the batches of single_gpu.py."""
    order = torch.Generator().manual_seed(seed + epoch)
    return list(BatchSampler(RandomSampler(range(size), generator=order), batch, drop_last=True))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("size", [60_000, 59_999, 1_500, 1_499])
def test_the_shares_make_up_the_global_batch(world_size, size):
    """The k-th batches of all ranks together are the k-th batch of one process, each image once, in every epoch."""
    for epoch in (0, 1):
        whole, parts = single(epoch, size), shares(world_size, epoch, size)
        assert {len(part) for part in parts} == {len(whole)}
        for step, batch in enumerate(whole):
            assert sorted(sum((part[step] for part in parts), [])) == sorted(batch)
        seen = sum(whole, [])
        assert len(seen) == len(set(seen)) == size // 120 * 120


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 7, 8])
@pytest.mark.parametrize("size", [10_000, 297])
def test_each_test_image_counts_once(world_size, size):
    """No padding, also for world sizes that do not divide; DistributedSampler would pad, which is why it isn't used."""
    shards = [range(rank, size, world_size) for rank in range(world_size)]
    assert sorted(sum(map(list, shards), [])) == list(range(size))
    padded = sum(len(DistributedSampler(range(size), world_size, rank, shuffle=False)) for rank in range(world_size))
    assert (padded > size) == (size % world_size > 0)


def test_set_epoch_changes_the_order():
    """Another order in each epoch, the same in each run; without set_epoch every epoch is like the first."""
    first, second = shares(2, 0), shares(2, 1)
    assert first != second
    assert first == shares(2, 0)
    sampler = DistributedSampler(range(100), 2, 0, seed=0)
    assert list(sampler) == list(sampler)
