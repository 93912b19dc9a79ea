"""What the counts of several pictures need: ranks on this machine, a batch, and a step."""

import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 784  # as many neurons as an image has pixels, so all layers but the last one are equal
MICRO_BATCHES = 8


def counts_of(rank: int, functions: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Call functions one after the other on a rank. Returns what they return, by name."""
    counts = {}
    for name, function in functions.items():
        torch.manual_seed(0)
        counts[name] = function()
    return counts


def of_all_ranks(own: Any) -> list:
    """Return what each rank has."""
    everything = [None] * dist.get_world_size()
    dist.all_gather_object(everything, own)
    return everything


def in_memory(references: Iterable[weakref.ref]) -> dict[weakref.ref, int]:
    """Return the bytes of those storages that are still in memory, by their weak references."""
    time.sleep(0.01)  # gloo's thread may hold a tensor for a moment after its message
    sizes = {}
    for reference in references:
        storage = reference()
        if storage is not None:
            sizes[reference] = storage.nbytes()
    return sizes


def random_batch(size: int) -> tuple[Tensor, Tensor]:
    """Return random images, (size, 1, 28, 28), and labels, int64 (size,)."""
    return torch.rand(size, 1, 28, 28), torch.randint(10, (size,))


def forward_and_backward(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Compute the gradients of a batch."""
    F.cross_entropy(model(images), labels).backward()


def runs(numbers: list[int]) -> list[list[int]]:
    """Return ascending numbers as a list of first numbers and ends: 0 1 2 6 7 is [0, 3], [6, 8]."""
    found = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def two_rows(names):
    """Return a mesh of all ranks with two rows."""
    return dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)
