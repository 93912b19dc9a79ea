"""A step of three_axes.py: what it sends along each axis."""

import torch.distributed as dist

from figures.messages import Messages


def show_axes(compute_gradients, batch, mesh, flat):
    """Compute the gradients of a batch. Rank 0 prints its messages along each axis.

    All ranks call this together. The groups of the mesh `flat`, which has the axes dp_cp and tp,
    carry what is not sent along the axes dp and cp of `mesh`.
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
