"""What all exhibits share: float64, the ranks, examples, and the digits. No fault is in here.

`python exhibit.py` is one process, and torchrun starts two. Both join a group, of one or two ranks,
so an exhibit needs no case for one process.
"""

import atexit
import os

import torch
import torch.distributed as dist

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
if "RANK" in os.environ:  # torchrun has started this process
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", "tcp://localhost:0", rank=0, world_size=1)
atexit.register(dist.destroy_process_group)
rank = dist.get_rank()
ranks = dist.get_world_size()

torch.manual_seed(0)
images = torch.randn(192, 16)  # in one of four classes each
labels = (images[:, :4].sum(dim=1) > 0).long() + 2 * (images[:, 4] > 0).long()
texts = torch.randint(32, (96, 17))  # of 16 tokens, and one more that has to be predicted
texts[:, 1::2] = (texts[:, :-1:2] * 5 + 3) % 32  # every second token follows from the one before


def batch(step, size=32):
    """Return the places of a step's examples: an epoch has six steps, and an order of its own."""
    epoch, number = divmod(step, 6)
    order = torch.randperm(6 * size, generator=torch.Generator().manual_seed(epoch))
    return order[number * size :][:size]


def mine(several, dim=0):
    """Return this rank's part of a tensor. One process gets all of it."""
    return several.chunk(ranks, dim)[rank]


def summed(term):
    """Add up a tensor over the ranks. Backward, each rank's term gets the gradient of the sum."""
    total = term.detach().clone()
    dist.all_reduce(total)
    return term + (total - term.detach())


def show(step, loss, count=1):
    """Print the sum of the ranks' losses, divided by the sum of their counts."""
    sums = torch.stack([loss.detach(), torch.as_tensor(count).double()])
    dist.all_reduce(sums)
    if rank == 0 and step % 3 == 2:
        print(f"step {step + 1:2}  loss {sums[0] / sums[1]:.12f}", flush=True)
