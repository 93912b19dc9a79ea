"""What the counts of several pictures need: ranks on this machine, a batch, and a step."""

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 784  # as many neurons as an image has pixels, so all layers but the last one are equal
MICRO_BATCHES = 8


def in_ranks(functions: dict[str, Callable[[], Any]], world_size: int) -> dict[str, Any]:
    """Call functions on each rank of a new process group. Returns what they return on rank 0.

    Args:
        functions: by name. They are called one after the other.
        world_size: number of ranks, which are processes on this machine.
    """
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        # The ranks meet in a file, because another process could take a port that is free now.
        mp.spawn(_call, (functions, world_size, f"file://{folder}/meet", results), world_size)
        return dict(results)


def _call(rank: int, functions: dict, world_size: int, address: str, results: dict) -> None:
    """Call the functions as one of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    for name, function in functions.items():
        torch.manual_seed(0)
        result = function()
        if rank == 0:
            results[name] = result
    dist.destroy_process_group()


def of_all_ranks(own: Any) -> list:
    """Return what each rank has."""
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, own)
    return everything


def random_batch(size: int) -> tuple[Tensor, Tensor]:
    """Return random images, (size, 1, 28, 28), and labels, int64 (size,)."""
    return torch.rand(size, 1, 28, 28), torch.randint(10, (size,))


def forward_and_backward(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Compute the gradients of a batch."""
    F.cross_entropy(model(images), labels).backward()


def two_rows(names):
    """Return a mesh of all ranks with two rows."""
    return dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
