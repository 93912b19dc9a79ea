"""Call functions in forked processes, as the ranks of a group. None of them imports PyTorch."""

import importlib
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import free_port
from preloaded import MODULES


def in_ranks(function, world_size, *args):
    """Call function(rank, world_size, port, results, *args) in so many processes.

    Returns the dictionary `results`, which they have filled.
    """
    with mp.Manager() as manager:
        results = manager.dict()
        start(function, world_size, results, *args)
        return dict(results)


def in_group(function, world_size, *args):
    """Call function(rank, *args) in so many processes, which form a group."""
    start(call_in_group, world_size, function, args)


def start(function, world_size, *args):
    """Call function(rank, world_size, port, *args) in so many processes, and wait for them."""
    for name in MODULES:
        importlib.import_module(name)  # once, and not in each rank
    mp.start_processes(function, (world_size, free_port(), *args), world_size, start_method="fork")


def join(rank, world_size, port):
    """Join a group as one of the ranks."""
    torch.set_num_threads(1)
    place = {"init_method": f"tcp://127.0.0.1:{port}", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(minutes=5), **place)


def call_in_group(rank, world_size, port, function, args):
    """Join the group, call the function, and leave the group."""
    join(rank, world_size, port)
    function(rank, *args)
    dist.destroy_process_group()
