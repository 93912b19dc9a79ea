"""Wrong answers to order_1f1b. See test_exercises.py for the docstrings."""

import torch.distributed as dist


def _order(warm_up, micro_batches):
    """Return the order with this number of forward passes at the beginning."""
    order = [f"F{number}" for number in range(warm_up)]
    for number in range(warm_up, micro_batches):
        order += [f"F{number}", f"B{number - warm_up}"]
    return order + [f"B{number}" for number in range(micro_batches - warm_up, micro_batches)]


def gpipe(rank, world_size, micro_batches, most):
    """WRONG with 1 rank, 3 micro-batches rank 0 has F0 F1 F2 B0 B1 B2 expected F0 B0 F1 B1 F2 B2
    Rank 0 keeps the activations of 3 micro-batches; 1 is the limit.
    """
    forward = [f"F{number}" for number in range(micro_batches)]
    return forward + [f"B{number}" for number in range(micro_batches)]


def without_the_limit(rank, world_size, micro_batches, most):
    """WRONG with 2 ranks, 4 micro-batches, 1 at most rank 0 has F0 F1 B0 ... Rank 0 keeps the
    activations of 2 micro-batches; 1 is the limit.
    """
    return _order(min(world_size - 1 - rank, micro_batches), micro_batches)


def no_warm_up(rank, world_size, micro_batches, most):
    """WRONG with 2 ranks, 3 micro-batches rank 0 has F0 B0 ... If each pass takes 1 ms, all ranks
    finish after 12 ms. The right order takes 8 ms, because
    """
    return _order(0, micro_batches)


def one_pass_too_many(rank, world_size, micro_batches, most):
    """WRONG with 1 rank, 3 micro-batches rank 0 has F0 F1 B0 ... Rank 0 keeps the activations of 2
    micro-batches; 1 is the limit.
    """
    return _order(min(world_size - rank, micro_batches), micro_batches)


def four_at_most(rank, world_size, micro_batches, most):
    """WRONG with 8 ranks, 8 micro-batches rank 0 has F0 F1 F2 F3 F4 B0 ... If each pass takes 1 ms,
    all ranks finish after 48 ms. The right order takes 30 ms, because
    """
    return _order(min(world_size - 1 - rank, micro_batches, 4, most - 1), micro_batches)


def more_than_there_are(rank, world_size, micro_batches, most):
    """WRONG with 3 ranks, 1 micro-batch rank 0 has F0 F1 B-1 B0 expected F0 B0 There is no F1 here:
    the micro-batches are 0 to 0.
    """
    return _order(min(world_size - 1 - rank, most - 1), micro_batches)


def without_the_end(rank, world_size, micro_batches, most):
    """WRONG with 2 ranks, 3 micro-batches rank 0 has F0 F1 B0 F2 B1 ... B2 is missing."""
    order = _order(min(world_size - 1 - rank, micro_batches), micro_batches)
    last = max(place for place, each in enumerate(order) if each.startswith("F"))
    return order[: last + 2]


def in_the_other_direction(rank, world_size, micro_batches, most):
    """WRONG with 2 ranks, 3 micro-batches rank 0 has F0 B0 ... The ranks wait for each other for
    ever: rank 0 at B0, rank 1 at F1.
    """
    return _order(min(rank, micro_batches), micro_batches)


def newest_first(rank, world_size, micro_batches, most):
    """WRONG with 2 ranks, 3 micro-batches rank 0 has F0 F1 B1 F2 B2 B0 ... B1 comes before B0.
    Passes of one kind must be in the order of their numbers.
    """
    warm_up = min(world_size - 1 - rank, micro_batches)
    order = [f"F{number}" for number in range(warm_up)]
    for number in range(warm_up, micro_batches):
        order += [f"F{number}", f"B{number}"]
    return order + [f"B{number}" for number in reversed(range(warm_up))]


def backward_first(rank, world_size, micro_batches, most):
    """WRONG with 1 rank, 3 micro-batches rank 0 has B0 F0 ... B0 comes before F0."""
    order = _order(min(world_size - 1 - rank, micro_batches), micro_batches)
    return [*order[1::-1], *order[2:]]


def from_one(rank, world_size, micro_batches, most):
    """WRONG with 1 rank, 3 micro-batches ... There is no F3 here: the micro-batches are 0 to 2."""
    order = _order(min(world_size - 1 - rank, micro_batches), micro_batches)
    return [f"{each[0]}{int(each[1:]) + 1}" for each in order]


def one_text(rank, world_size, micro_batches, most):
    """WRONG with 1 rank, 3 micro-batches ... Return a list of strings, such as ["F0", "B0"]."""
    return " ".join(_order(min(world_size - 1 - rank, micro_batches), micro_batches))


def from_the_group(rank, world_size, micro_batches, most):
    """CRASH with 1 rank, 3 micro-batches rank 0: ValueError: ... process group"""
    return _order(min(world_size - 1 - dist.get_rank(), micro_batches), micro_batches)
