"""A step of a model whose layers are split: its distance from the whole model, and its messages."""

import platform

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from measure.messages import Messages


def compare_step(model: nn.Module, whole_model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Run a step of both models without changing parameters; rank 0 prints how far they are apart.

    It also prints the messages of the step. All ranks must call this together.

    Args:
        model: its parameters are DTensors, this rank's shards, or whole.
        whole_model: has the same parameters, all of them whole, on the CPU.
        images, labels: a batch, (B, 1, 28, 28) and int64 (B,), the same on all ranks.
    """
    expected = whole_model(images)
    F.cross_entropy(expected, labels).backward()
    device = next(model.parameters()).device
    with Messages() as forward:
        outputs = model(images.to(device))
    with Messages() as backward:
        F.cross_entropy(outputs, labels.to(device)).backward()
    gradients_apart = torch.zeros(())
    for mine, whole in zip(model.parameters(), whole_model.parameters(), strict=True):
        gradient = mine.grad
        if gradient is None:
            continue  # a frozen parameter
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        distance = (gradient.cpu() - _shard_like(gradient, whole.grad)).abs().max()
        gradients_apart = torch.maximum(gradients_apart, distance)
    outputs_apart = (outputs.cpu() - expected).detach().abs().max()
    apart = torch.stack([outputs_apart, gradients_apart]).to(device)
    dist.all_reduce(apart, op=dist.ReduceOp.MAX)

    linear = [layer for layer in whole_model.modules() if isinstance(layer, nn.Linear)]
    in_forward = len(linear) // 2
    in_backward = in_forward
    if next(whole_model.parameters()) is linear[0].weight:
        in_backward -= 1  # the first pair's input is the images, which need no gradient
    by_dtensor = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    if by_dtensor and dist.get_world_size() == 1:
        in_forward = 0  # DTensors leave out messages of a rank to itself
        in_backward = 0
    if dist.get_rank() == 0:
        print(
            f"outputs differ from the whole model's by {apart[0]:.0e}, gradients by {apart[1]:.0e}"
            f"\nall_reduce in forward: {len(forward.noted)}, in backward:"
            f" {len(backward.noted)} (predicted: {in_forward} and {in_backward})",
            flush=True,
        )
    model.zero_grad()


def show_axes(mesh: DeviceMesh, model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Run a step without changing parameters; rank 0 prints the mesh, and the messages by axis.

    All ranks must call this together.

    Args:
        mesh: has the axes "dp" (fully_shard) and "tp" (linear layers in pairs), or the axes
            "replicate" and "shard" (fully_shard on both).
        model: its parameters are DTensors on this mesh.
        images, labels: a batch of this rank, (B, 1, 28, 28) and int64 (B,).
    """
    images = images.to(mesh.device_type)
    labels = labels.to(mesh.device_type)
    for _ in range(2):  # the first step after a test gathers one layer more than the others
        model.zero_grad()
        with Messages() as messages:
            F.cross_entropy(model(images), labels).backward()
    model.zero_grad()
    device = next(model.parameters()).to_local().device
    places = [None] * dist.get_world_size()
    dist.all_gather_object(places, f"rank {dist.get_rank()} ({platform.node()}, {device})")
    if dist.get_rank() == 0:
        _print_mesh(mesh, places)
        if "tp" in mesh.mesh_dim_names:
            rows = _predict_tp(mesh, model, images)
        else:
            rows = _predict_hsdp(mesh, model)
        _print_messages(mesh, messages, rows)


def _print_mesh(mesh: DeviceMesh, places: list[str]) -> None:
    """Print a line for each row of the mesh."""
    down, across = mesh.mesh_dim_names
    width = max(map(len, places)) + 3
    margin = len(down) + 4
    names = [f"{across} {column}" for column in range(mesh.shape[1])]
    print((" " * margin + "".join(name.ljust(width) for name in names)).rstrip())
    for row, ranks in enumerate(mesh.mesh.tolist()):
        line = "".join(places[rank].ljust(width) for rank in ranks).rstrip()
        print(f"{down} {row}".ljust(margin) + line)


def _print_messages(mesh: DeviceMesh, messages: Messages, rows: list) -> None:
    """Print the table of messages, without the axes of a single rank."""
    print("axis       collective      counted  predicted  bytes sent  predicted")
    for axis, collective, number, size in rows:
        ranks = mesh[axis].size()
        if ranks == 1:
            continue
        group = mesh[axis].get_group().group_name
        counted = len(messages.of(collective, group))
        in_ring = (ranks - 1) / ranks  # of the tensor, for a reduce_scatter and for an all_gather
        if collective == "all_reduce":
            in_ring *= 2  # it is both, one after the other
        sent = messages.sent(collective, group)
        print(
            f"{axis:<11}{collective:<16}{counted:<9}{number:<11}{sent:<12,.0f}"
            f"{size * in_ring:,.0f}",
            flush=True,
        )


def _predict_tp(mesh: DeviceMesh, model: nn.Module, images: Tensor) -> list:
    """Return axis, collective, how many there should be, and the bytes of all their tensors."""
    layers = _layers(model)
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    numbers = 0  # for each image, of the outputs of all pairs and of the gradients of their inputs
    count = 0
    for column, row in zip(linear[::2], linear[1::2], strict=False):
        numbers += row.out_features
        count += 1
        if column is not layers[0]:
            numbers += column.in_features
            count += 1
    kept = 0  # bytes of the parameters in this rank's column of the mesh
    for parameter in model.parameters():
        on_both_axes = parameter.device_mesh.ndim == 2
        if on_both_axes and parameter.placements[1].is_shard():
            kept += parameter.nbytes // mesh["tp"].size()
        else:
            kept += parameter.nbytes  # the bias of a pair's second layer, and layers outside pairs
    return [
        ("tp", "all_reduce", count, numbers * len(images) * images.element_size()),
        ("dp", "all_gather", 2 * len(layers), 2 * kept),
        ("dp", "reduce_scatter", len(layers), kept),
    ]


def _predict_hsdp(mesh: DeviceMesh, model: nn.Module) -> list:
    """Return axis, collective, how many there should be, and the bytes of all their tensors."""
    count = len(_layers(model))
    size = sum(parameter.nbytes for parameter in model.parameters())
    return [
        ("shard", "all_gather", 2 * count, 2 * size),
        ("shard", "reduce_scatter", count, size),
        ("replicate", "all_reduce", count, size // mesh["shard"].size()),
    ]


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that have parameters."""
    return [layer for layer in model.modules() if list(layer.parameters(recurse=False))]


def _shard_like(mine: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, split as `mine` is."""
    for dim, (size, whole_size) in enumerate(zip(mine.shape, whole.shape, strict=True)):
        if size != whole_size:
            return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return whole
