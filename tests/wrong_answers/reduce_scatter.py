"""Wrong answers to reduce_scatter. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _received(tensor):
    """Return the chunks that are sent to this rank, one in each row."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    return received.view(dist.get_world_size(), -1)


def not_added_up(tensor):
    """WRONG with 2 ranks ... rank 0, the returned tensor: a tensor of shape (2, 2)"""
    return _received(tensor) if dist.get_world_size() > 1 else tensor.clone()


def averaged(tensor):
    """WRONG with 2 ranks ... what is expected, divided by 2: averaged, but not added up?"""
    rows = _received(tensor)
    return rows.sum(0) // len(rows) if rows.dtype == torch.int64 else rows.mean(0)


def along_the_wrong_axis(tensor):
    """WRONG with 1 rank ... rank 0, the returned tensor: a tensor of shape (1,)"""
    return _received(tensor).sum(1)


def without_its_own(tensor):
    """WRONG with 1 rank ... Rank 0's numbers are missing."""
    rows = _received(tensor)
    return rows.sum(0) - rows[dist.get_rank()]


def the_next_chunk(tensor):
    """WRONG with 2 ranks ... This is chunk 1 of the sum, which is rank 1's."""
    chunks = tensor.chunk(dist.get_world_size())
    return _received(torch.cat([*chunks[1:], chunks[0]])).sum(0)


def in_place(tensor):
    """WRONG with 2 ranks ... The tensor of the caller has changed."""
    rows = _received(tensor)
    total = rows.sum(0)
    tensor[: len(total)] = total
    return total


def whole_tensors(tensor):
    """COSTLY with 2 ranks ... rank 0 sends 16 bytes; 8 are enough: 2 times the bytes ...
    Each rank sends its whole tensor.
    """
    rank = dist.get_rank()
    total = tensor.clone()
    for other in range(dist.get_world_size()):
        if other != rank:
            received = torch.empty_like(tensor)
            request = dist.isend(tensor, other)
            dist.recv(received, other)
            request.wait()
            total += received
    return total.chunk(dist.get_world_size())[rank]


def built_in(tensor):
    """WRONG with 1 rank ... dist.all_reduce is what this exercise builds: use all_to_all_single"""
    total = tensor.clone()
    dist.all_reduce(total)
    return total.chunk(dist.get_world_size())[dist.get_rank()]


def rank_0_only(tensor):
    """HANG with 2 ranks ... rank 1 has finished"""
    if dist.get_rank() == 0:
        return _received(tensor).sum(0)
    return tensor
