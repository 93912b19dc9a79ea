"""Write the trained parameters of a lesson, which has no flag for it, to a file for each rank.

preloaded.py calls `remember` in a process that it forks if the environment has PARAMETERS, the
folder for the files.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def remember(folder: Path) -> Callable[[], None]:
    """Remember each Adam that is made in this process, or in a process that it forks.

    A rank writes the parameters before it destroys its process group. The function that is returned
    writes them in a process without a group, at its end.
    """
    optimizers = []
    make_adam = torch.optim.Adam.__init__
    destroy = dist.destroy_process_group

    def make_and_remember(optimizer, *arguments, **options):
        make_adam(optimizer, *arguments, **options)
        optimizers.append(optimizer)

    def write(rank=0):
        trained = []
        for optimizer in optimizers:
            for parameter in optimizer.state:
                value = parameter.detach()
                if isinstance(value, DTensor):
                    value = value.full_tensor()
                trained.append(value)
        if trained:
            torch.save(trained, folder / f"rank{rank}.pt")
        optimizers.clear()  # a DTensor refers to the group, and must not outlive it

    def write_and_destroy():
        write(dist.get_rank())
        destroy()

    torch.optim.Adam.__init__ = make_and_remember
    dist.destroy_process_group = write_and_destroy
    return write


def join_shards(models: list[list[torch.Tensor]], expected: list[torch.Tensor]) -> list:
    """Return whole parameters, of which each rank has shards of flat tensors with zeros at the end.

    Args:
        models: the shards of each rank.
        expected: the parameters, for their order and shapes.
    """
    flat = [torch.cat(shards) for shards in zip(*models, strict=True)]
    found = []
    for parameter in expected:
        if len(flat[0]) < parameter.numel():
            flat.pop(0)  # only zeros are left
        found.append(flat[0][: parameter.numel()].view(parameter.shape))
        flat[0] = flat[0][parameter.numel() :]
    return found


def largest_difference(folder: Path, expected: list[torch.Tensor], flat: bool = False) -> float:
    """Return how far the parameters in a folder are from these at most.

    Either each rank has all of them, or they are divided among the ranks, in any order. If they are
    flat, each rank has its shards.
    """
    models = [torch.load(path) for path in sorted(folder.glob("rank*.pt"))]
    if flat:
        models = [join_shards(models, expected)]
    if any(len(model) < len(expected) for model in models):
        models = [sum(models, [])]
    differences = []
    for model in models:
        assert len(model) == len(expected)
        for parameter in expected:
            same_shape = [found for found in model if found.shape == parameter.shape]
            apart = [(found - parameter).abs().max().item() for found in same_shape]
            differences.append(min(apart))  # the others with its shape are other layers
    return max(differences)
