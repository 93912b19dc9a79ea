"""Why: of two neighbours one sends first and the other receives first, so both calls return."""

import torch
import torch.distributed as dist


def swap_with_neighbour(tensor):
    """Return the neighbour's tensor. The last of an odd number of ranks returns its own."""
    rank = dist.get_rank()
    other = rank + 1 if rank % 2 == 0 else rank - 1
    if other == dist.get_world_size():
        return tensor
    received = torch.empty_like(tensor)
    if rank % 2 == 0:
        dist.send(tensor, other)
        dist.recv(received, other)
    else:
        dist.recv(received, other)
        dist.send(tensor, other)
    return received
