"""Find the fault: the program runs on one node, and fails on two.

Lesson: distributed_data_parallel_torchrun.py.

`train(model, download)` trains one model on all ranks. The images are in a file that
`download(path)` fetches. Each node has a disk of its own, which only the ranks of this node can
read, so the file must be downloaded once on each node. On two nodes the program ends with an error.
Find the fault, and repair train.

The check simulates nodes with 2 or 3 ranks each. The last node may have fewer. Each node has a
folder of its own. As torchrun does, the check sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE
and GROUP_RANK in the environment.

It is repaired if
- the file is downloaded exactly once on each node;
- no rank reads the file before download has returned on its node;
- the ranks of all nodes together still use each image once.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_missing_file.py
"""

import os

import torch
import torch.distributed as dist
from check import check
from torch.nn import functional as F


def train(model, download):
    """Take one step with all images. The working directory is on the disk of this node."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if rank == 0:
        download("images.pt")
    dist.barrier()
    images, labels = torch.load("images.pt")
    loss = F.cross_entropy(model(images[rank::world_size]), labels[rank::world_size])
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


if __name__ == "__main__":
    check(__file__)
