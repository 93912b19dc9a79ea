"""detectron2.utils.comm, as documented: ranks and collectives that also work without a group.

Like the real one, it keeps two process groups until Python ends.
"""

import functools
import random

import torch
import torch.distributed as dist

_local_group = None


def create_local_process_group(num_workers_per_machine):
    """Make a group of the ranks of each machine, and remember that of this one."""
    global _local_group
    for first in range(0, get_world_size(), num_workers_per_machine):
        ranks = list(range(first, first + num_workers_per_machine))
        group = dist.new_group(ranks)
        if get_rank() in ranks:
            _local_group = group


def get_world_size():
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def get_rank():
    """Return the rank of this process among all."""
    return dist.get_rank() if dist.is_initialized() else 0


def get_local_rank():
    """Return the rank of this process on its machine."""
    return dist.get_rank(_local_group) if dist.is_initialized() else 0


def is_main_process():
    """Return whether this is rank 0."""
    return get_rank() == 0


def synchronize():
    """Wait until all processes have called this."""
    if get_world_size() > 1:
        dist.barrier()


@functools.cache
def _group_for_objects():
    """Return a group of all ranks that sends objects through the memory of the CPU."""
    if dist.get_backend() == "nccl":
        return dist.new_group(backend="gloo")
    return dist.group.WORLD


def all_gather(data):
    """Return the list of every rank's `data`, any object that can be pickled, on all ranks."""
    if get_world_size() == 1:
        return [data]
    everyone = [None] * get_world_size()
    dist.all_gather_object(everyone, data, _group_for_objects())
    return everyone


def gather(data, dst=0):
    """Return the list of every rank's `data` on rank `dst`, and an empty list on the others."""
    everyone = all_gather(data)
    return everyone if get_rank() == dst else []


def shared_random_seed():
    """Return a random number that is the same on all ranks."""
    return all_gather(random.randrange(2**31))[0]


def reduce_dict(input_dict, average=True):
    """Add up, or average, a dict of scalar tensors over the ranks. Rank 0 has the result."""
    if get_world_size() == 1:
        return input_dict
    names = sorted(input_dict)
    values = torch.stack([input_dict[name] for name in names])
    dist.reduce(values, dst=0)
    if is_main_process() and average:
        values /= get_world_size()
    return dict(zip(names, values, strict=True))
