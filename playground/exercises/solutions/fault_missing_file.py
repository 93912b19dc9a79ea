"""Why: the first rank of each node has local rank 0, and only node 0 has rank 0."""

import os

import torch
import torch.distributed as dist
from torch.nn import functional as F


def train(model, download):
    """Take one step with all images. The working directory is on the disk of this node."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank == 0:
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
