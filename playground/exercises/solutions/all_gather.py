"""Why: an all_to_all in which a rank sends the same chunk to each rank is an all-gather."""

import torch
import torch.distributed as dist


def all_gather(chunk):
    """Return the chunks of all ranks one after another, as a new tensor with one axis."""
    copies = chunk.repeat(dist.get_world_size())
    received = torch.empty_like(copies)
    dist.all_to_all_single(received, copies)
    return received
