"""Wrong answers to seeded_dropout. See test_exercises.py for the docstrings."""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _own_seed(seed, step):
    """Return a seed that no other rank and step has."""
    return seed + step * dist.get_world_size() + dist.get_rank()


def _drop(inputs, p, seed):
    """Drop numbers with this seed."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.rand(inputs.shape, generator=generator)
    return torch.where(random < p, 0, inputs / (1 - p))


def without_a_seed(inputs, p, seed, step):
    """WRONG with 1, then 1 rank, p = 0.5 ... called twice for one step: different numbers
    are dropped ... Seed in each call
    """
    return F.dropout(inputs, p)


def without_the_rank(inputs, p, seed, step):
    """WRONG with 2, then 2 ranks, p = 0.5, with any seeding rank 0, dropped in both: rank 0 in step
    0, and rank 1 in step 0 ... The ranks must differ: does the seed depend on the rank?"""
    return _drop(inputs, p, seed + step)


def without_the_step(inputs, p, seed, step):
    """WRONG with 1, then 1 rank ... rank 0 in step 0, and rank 0 in step 1 ... depend on `step`"""
    return _drop(inputs, p, seed + dist.get_rank())


def rank_plus_step(inputs, p, seed, step):
    """WRONG with 2, then 2 ranks ... rank 0 in step 1, and rank 1 in step 0 ... Two ranks have the
    same seed in different steps. Multiply the step by the number of ranks
    """
    return _drop(inputs, p, seed + step + dist.get_rank())


def far_apart(inputs, p, seed, step):
    """WRONG with 2, then 2 ranks ... rank 0 in step 1003, and rank 1 in step 3 ... Two ranks"""
    return _drop(inputs, p, seed + 1000 * dist.get_rank() + step)


def without_the_run(inputs, p, seed, step):
    """WRONG with 1, then 1 rank ... a different seed: the same numbers ... `seed` has no effect"""
    return _drop(inputs, p, _own_seed(0, step))


def global_seed(inputs, p, seed, step):
    """WRONG with 1, then 1 rank ... PyTorch's random numbers: changed ... Draw from a generator"""
    torch.manual_seed(_own_seed(seed, step))
    return F.dropout(inputs, p)


def by_the_process(inputs, p, seed, step):
    """WRONG with 1, then 1 rank ... after the restart: different numbers are dropped ... Some"""
    return _drop(inputs, p, _own_seed(seed, step) + os.getpid() * 2**20)


def not_scaled(inputs, p, seed, step):
    """WRONG with 1, then 1 rank, p = 0.5, with any seeding rank 0, the others: times 1 expected
    times 2"""
    return _drop(inputs, p, _own_seed(seed, step)) * (1 - p)


def p_is_kept(inputs, p, seed, step):
    """WRONG with 1, then 1 rank, p = 0.1, float64 rank 0, dropped: 90% expected about 10%"""
    return _drop(inputs, 1 - p, _own_seed(seed, step)) * p / (1 - p)


def whole_columns(inputs, p, seed, step):
    """WRONG with 1, then 1 rank, p = 0.5 ... each by itself: all rows are alike"""
    generator = torch.Generator().manual_seed(_own_seed(seed, step))
    random = torch.rand(inputs.shape[-1], generator=generator)
    return torch.where(random < p, 0, inputs / (1 - p))


def in_place(inputs, p, seed, step):
    """WRONG with 1, then 1 rank, p = 0.5, with any seeding rank 0, its inputs: changed ... Return a
    new tensor."""
    with torch.no_grad():
        return inputs.copy_(_drop(inputs, p, _own_seed(seed, step)))


def seed_of_rank_0(inputs, p, seed, step):
    """COSTLY with 1, then 1 rank ... A rank knows its rank and the step, so it needs no"""
    first = torch.tensor([seed])
    dist.broadcast(first, 0)
    return _drop(inputs, p, _own_seed(first.item(), step))


def without_a_gradient(inputs, p, seed, step):
    """WRONG with 1, then 1 rank, p = 0.5, with any seeding rank 0, the gradient: none"""
    return _drop(inputs.detach(), p, _own_seed(seed, step))


def mirrored(inputs, p, seed, step):
    """WRONG with 2, then 2 ranks, p = 0.5, with any seeding rank 0, with no number in common: rank
    0 in step 0, and rank 1 in step 0 ... Each needs random numbers of its own."""
    pair = dist.get_rank() // 2
    generator = torch.Generator().manual_seed(seed + step * dist.get_world_size() + pair)
    random = torch.rand(inputs.shape, generator=generator)
    if dist.get_rank() % 2:
        random = 1 - random
    return torch.where(random < p, 0, inputs / (1 - p))
