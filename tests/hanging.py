"""Three ranks that hang, each time for a different reason: python hanging.py FAULT.

It knows nothing of watch.py, and torchrun may start its ranks.
"""

import os
import re
import signal
import sys
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

RANKS = 3


def early(rank):
    """Rank 1 leaves the loop one step before the others."""
    for _ in range(3 if rank == 1 else 4):
        dist.all_reduce(torch.ones(4))
    dist.barrier()


def root(rank):
    """Rank 0 calls a collective inside `if rank == 0`."""
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    dist.barrier()


def test(rank):
    """Rank 0 tests alone with DDP, which sends the buffers of batch norm."""
    model = DistributedDataParallel(nn.BatchNorm1d(4))
    model(torch.ones(8, 4)).sum().backward()
    if rank == 0:
        model(torch.ones(8, 4))
    dist.barrier()


def peer(rank):
    """In step 2, rank 1 sends to the rank on its left, and all others send to the right."""
    right, left = (rank + 1) % RANKS, (rank - 1) % RANKS
    for step in range(4):
        request = dist.isend(torch.ones(4), left if rank == 1 and step == 2 else right)
        dist.recv(torch.empty(4), left)
        request.wait()


def shape(rank):
    """Rank 1 has five numbers, and the others have four."""
    for _ in range(3):
        dist.all_reduce(torch.ones(5 if rank == 1 else 4))


def shard(rank):
    """Rank 1 has three batches for FSDP, and the others have four."""
    model = fully_shard(nn.Linear(4, 4))
    for _ in range(3 if rank == 1 else 4):
        model(torch.ones(8, 4)).sum().backward()
    dist.all_reduce(torch.ones(4))


class Slow:
    """A data set that does not answer on rank 1, as on a network disk."""

    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 8

    def __getitem__(self, index):
        """Return a number."""
        if self.rank == 1 and index == 5:
            time.sleep(60)
        return torch.ones(4)


def loader(rank):
    """The data set of rank 1 does not answer."""
    for batch in DataLoader(Slow(rank), 2):
        dist.all_reduce(batch)


def killed(rank):
    """The system kills rank 1, as it does when memory has run out."""
    for step in range(4):
        if rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(4))


def frozen(rank):
    """Rank 1 is in a search that takes years, and that lets no other thread of Python run."""
    if rank == 1:
        re.match("(a+)+$", 60 * "a" + "b")
    dist.all_reduce(torch.ones(4))


def run(rank, fault, where, timeout):
    """Join the group, and run into the fault."""
    dist.init_process_group("gloo", where, timedelta(seconds=timeout), RANKS, rank)
    dist.barrier()
    globals()[fault](rank)
    dist.destroy_process_group()


def main():
    """Start the ranks, if torchrun has not."""
    fault, timeout = sys.argv[1], float(sys.argv[2])
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), fault, "env://", timeout)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (fault, f"file://{folder}/meet", timeout), RANKS)


if __name__ == "__main__":
    main()
