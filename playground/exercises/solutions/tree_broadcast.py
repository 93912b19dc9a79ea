"""Why: each round doubles the number of ranks that have the tensor, so ceil(log2 n) are enough."""

import torch.distributed as dist


def tree_broadcast(tensor):
    """Replace the tensor of each rank by that of rank 0."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    have = 1  # ranks 0 to have - 1 have the tensor
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
        have *= 2
