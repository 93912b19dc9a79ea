"""A step of three_axes.py: what it sends along each axis."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from figures.messages import Messages


def show_axes(
    compute_gradients: Callable, batch: Sequence[Tensor], mesh: DeviceMesh, flat: DeviceMesh
) -> None:
    """Run a step of three_axes.py. Rank 0 prints its messages along each axis.

    All ranks must call this together.

    Args:
        compute_gradients: takes images and labels, and computes the gradients of the model.
        batch: the images and labels of this rank.
        mesh: has the axes "dp", "cp" and "tp".
        flat: has the axes "dp_cp" and "tp". Its groups carry what is not sent along "dp" or "cp".
    """
    compute_gradients(*batch)  # with --fsdp, the first step after a test gathers more than others
    with Messages() as messages:
        compute_gradients(*batch)
    if dist.get_rank() > 0:
        return
    for axis in ("dp", "cp", "dp_cp", "tp"):
        group = (mesh if axis in ("dp", "cp") else flat).get_group(axis)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "send"):
            count = len(messages.of(kind, group.group_name))
            sent = messages.sent(kind, group.group_name)
            if count and group.size() > 1:
                print(f"{axis} {kind}: {count} messages, {sent:.0f} bytes")
