"""Three ranks with a fault that watch.py shows: python watched.py FAULT.

It knows nothing of watch.py, and torchrun may start its ranks.
"""

import os
import re
import signal
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader


class Slow:
    """A data set that does not answer, as on a network disk."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        """Return nothing, for a long time."""
        time.sleep(999)


def apart(rank):
    """Rank 1 searches for years, and no other thread of Python runs. Rank 2 waits for its data."""
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.recv(torch.empty(4), 1)
    if rank == 1:
        re.match("(a+)+$", 60 * "a" + "b")
    for _ in DataLoader(Slow()):
        pass


def killed(rank):
    """The system kills rank 1, as it does when memory has run out."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(999)


def slow(rank, steps=12):
    """Rank 1 is slow in each step of DDP."""
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        if rank == 1:
            time.sleep(0.2)
        loss = model(torch.ones(8, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def few(rank):
    """There are only three steps."""
    slow(rank, 3)


def fails(rank):
    """Rank 1 ends with an error."""
    slow(rank, 2)
    if rank == 1:
        raise ValueError("rank 1 fails")
    time.sleep(999)


def run(rank, fault, where, size):
    """Join the group, and run into the fault."""
    dist.init_process_group("gloo", where, rank=rank, world_size=size)
    dist.barrier()
    globals()[fault](rank)
    dist.destroy_process_group()


def main():
    """Start the ranks, if torchrun has not."""
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), sys.argv[1], "env://", int(os.environ["WORLD_SIZE"]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (sys.argv[1], f"file://{folder}/meet", 3), 3)


if __name__ == "__main__":
    main()
