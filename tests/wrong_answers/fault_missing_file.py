"""Wrong repairs of fault_missing_file. See test_exercises.py for the docstrings."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _train(model, rank, world_size):
    """Read the file and take a step with this part of the images, as the exercise does."""
    images, labels = torch.load("images.pt")
    F.cross_entropy(model(images[rank::world_size]), labels[rank::world_size]).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter -= 0.1 * parameter.grad / dist.get_world_size()


def local_rank_everywhere(model, download):
    """WRONG with 3 ranks, 2 ranks on each node ... image 0 is used on ranks 0 and 2, and image 2"""
    rank = int(os.environ["LOCAL_RANK"])
    if rank == 0:
        download("images.pt")
    dist.barrier()
    _train(model, rank, dist.get_world_size())


def each_node_by_itself(model, download):
    """WRONG with 3 ranks, 2 ranks on each node ... the images: image 0 is used on ranks 0 and 2"""
    rank = int(os.environ["LOCAL_RANK"])
    if rank == 0:
        download("images.pt")
    dist.barrier()
    _train(model, rank, int(os.environ["LOCAL_WORLD_SIZE"]))


def every_rank_downloads(model, download):
    """WRONG with 2 ranks ... downloads on node 0: 2 ... 2 ranks of node 0 have downloaded the"""
    download("images.pt")
    dist.barrier()
    _train(model, dist.get_rank(), dist.get_world_size())


def if_it_is_not_there(model, download):
    """WRONG with 2 ranks, 2 ranks on each node ... expected ... 1 ... 2 ranks of node 0"""
    if not os.path.exists("images.pt"):
        download("images.pt")
    dist.barrier()
    _train(model, dist.get_rank(), dist.get_world_size())


def two_on_each_node(model, download):
    """WRONG with 3 ranks, 3 ranks on each node ... 2 ranks of node 0 have downloaded the file."""
    if dist.get_rank() % 2 == 0:
        download("images.pt")
    dist.barrier()
    _train(model, dist.get_rank(), dist.get_world_size())


def no_barrier(model, download):
    """CRASH with 2 ranks ... rank 1: FileNotFoundError ... images.pt"""
    if os.environ["LOCAL_RANK"] == "0":
        download("images.pt")
    _train(model, dist.get_rank(), dist.get_world_size())


def a_barrier_on_one_rank(model, download):
    """HANG with 2 ranks ... rank 0 waits ... dist.barrier()"""
    if os.environ["LOCAL_RANK"] == "0":
        download("images.pt")
        dist.barrier()
    time.sleep(1)  # longer than the download takes
    _train(model, dist.get_rank(), dist.get_world_size())


def waits_until_the_file_exists(model, download):
    """CRASH with 2 ranks, 2 ranks on each node rank 1: RuntimeError: ... a part of it is"""
    if os.environ["LOCAL_RANK"] == "0":
        download("images.pt")
    while not os.path.exists("images.pt"):
        time.sleep(0.1)
    _train(model, dist.get_rank(), dist.get_world_size())


def compares_with_a_number(model, download):
    """CRASH with 1 rank ... rank 0: FileNotFoundError ... images.pt"""
    if os.environ["LOCAL_RANK"] == 0:
        download("images.pt")
    dist.barrier()
    _train(model, dist.get_rank(), dist.get_world_size())


def gpus_of_a_node(model, download):
    """CRASH with 1 rank ... ZeroDivisionError"""
    if dist.get_rank() % torch.cuda.device_count() == 0:
        download("images.pt")
    dist.barrier()
    _train(model, dist.get_rank(), dist.get_world_size())
