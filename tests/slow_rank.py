"""Two ranks train with DDP, and rank 1 is slow in each step: python slow_rank.py STEPS [fail].

It knows nothing of watch.py, and torchrun may start its ranks. With `fail`, rank 1 ends in step 2
with an error.
"""

import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def run(rank, where, steps, fails):
    """Train."""
    dist.init_process_group("gloo", where, world_size=2, rank=rank)
    model = DistributedDataParallel(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        if rank == 1:
            time.sleep(0.2)
        loss = model(torch.ones(8, 8)).sum()
        loss.backward()
        if fails and rank == 1 and step == 2:
            raise ValueError("rank 1 fails")
        optimizer.step()
        optimizer.zero_grad()
    del model
    dist.destroy_process_group()


def main():
    """Start the ranks, if torchrun has not."""
    steps, fails = int(sys.argv[1]), "fail" in sys.argv
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), "env://", steps, fails)
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (f"file://{folder}/meet", steps, fails), 2)


if __name__ == "__main__":
    main()
