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
        trained = [each.detach() for optimizer in optimizers for each in optimizer.state]
        trained = [each.full_tensor() if isinstance(each, DTensor) else each for each in trained]
        if trained:
            torch.save(trained, folder / f"rank{rank}.pt")
        optimizers.clear()  # a DTensor refers to the group, and must not outlive it

    def write_and_destroy():
        write(dist.get_rank())
        destroy()

    torch.optim.Adam.__init__ = make_and_remember
    dist.destroy_process_group = write_and_destroy
    return write


def largest_difference(folder: Path, expected: list[torch.Tensor], flat: bool = False) -> float:
    """Return how far the sorted numbers of the parameters in a folder are from these at most.

    Either each rank has all of them, or they are divided among the ranks, in any order, where
    several ranks may have the same. If they are flat, the shards have zeros at their ends.
    """
    models = []
    for path in folder.glob("rank*.pt"):
        model = torch.cat([parameter.flatten() for parameter in torch.load(path)])
        if not any(model.equal(other) for other in models):
            models.append(model)
    right = torch.cat([parameter.flatten() for parameter in expected])
    if any(len(model) < len(right) for model in models):
        models = [torch.cat(models)]
    differences = []
    for model in models:
        found, numbers = (each[each != 0] if flat else each for each in (model, right))
        differences.append((found.sort()[0] - numbers.sort()[0]).abs().max().item())
    return max(differences)
