"""What a step of a model that is cut into pieces comes to, and its messages, beside what they should be."""

import os
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F


def compare_step(model: nn.Module, whole_model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Run a step of both models without changing weights; rank 0 prints how far they are apart, and what it took.

    Args:
        model: its weights are DTensors, or this rank's chunks of the whole model's, or as the whole model's.
        whole_model: has the same weights in one piece, on the CPU.
        images, labels: the batch, the same on all ranks, which must call this together.
    """
    expected = whole_model(images)
    F.cross_entropy(expected, labels).backward()
    device = next(model.parameters()).device
    with CommDebugMode() as forward:
        outputs = model(images.to(device))
    with CommDebugMode() as backward:
        F.cross_entropy(outputs, labels.to(device)).backward()
    apart = [torch.zeros(())]
    for mine, weight in zip(model.parameters(), whole_model.parameters(), strict=True):
        if mine.grad is not None:  # else this rank leaves it to another
            gradient = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
            apart.append((gradient.cpu() - _chunk_like(gradient, weight.grad)).abs().max())
    furthest = torch.stack([(outputs.cpu() - expected).detach().abs().max(), max(apart)]).to(device)
    dist.all_reduce(furthest, dist.ReduceOp.MAX)
    linear = [layer for layer in whole_model.modules() if isinstance(layer, nn.Linear)]
    pairs, first = len(linear) // 2, next(whole_model.parameters()) is linear[0].weight
    if dist.get_world_size() == 1 and any(isinstance(weight, DTensor) for weight in model.parameters()):
        pairs, first = 0, False  # a DTensor sends itself no messages
    if dist.get_rank() == 0:
        print("outputs differ from the whole model's by {:.0e}, gradients by {:.0e}".format(*furthest.tolist()))
        counted = f"all_reduce in forward: {forward.get_total_counts()}, in backward: {backward.get_total_counts()}"
        each = "one for each pair of layers" + ", none for images" * first
        print(f"{counted}  (predicted: {pairs} and {pairs - first}, {each})", flush=True)
    model.zero_grad()


def show_axes(mesh: DeviceMesh, model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Run a step of a model on a mesh without changing weights; rank 0 prints who is where, and who sends what.

    Args:
        mesh: has the axes "dp" (fully_shard) and "tp" (linear layers in pairs).
        model: its weights are DTensors on this mesh.
        images, labels: a batch, the same for the ranks of a tp group. All ranks must call this together.
    """
    images, labels = images.to(mesh.device_type), labels.to(mesh.device_type)
    for _ in range(2):  # the first step after a test gathers one layer too many
        model.zero_grad()
        with warnings.catch_warnings(action="ignore"), CommDebugMode() as counted:  # whose hooks make FSDP warn
            F.cross_entropy(model(images), labels).backward()
    model.zero_grad()
    pieces = [weight.to_local() for weight in model.parameters()]
    me = f"rank {dist.get_rank()} ({os.uname().nodename}, {pieces[0].device})"
    dist.all_gather_object(everyone := [None] * dist.get_world_size(), me)
    if dist.get_rank() > 0:
        return
    rows, columns = mesh.shape
    width = max(map(len, everyone)) + 3
    print((" " * 6 + "".join(f"{f'tp {column}':<{width}}" for column in range(columns))).rstrip())
    for row, ranks in enumerate(mesh.mesh.tolist()):
        print(f"dp {row}  " + "".join(f"{everyone[rank]:<{width}}" for rank in ranks).rstrip())
    layers = [layer for layer in model.modules() if list(layer.parameters(recurse=False))]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    ends = [layer.out_features for layer in linear[1::2]]
    begins = [layer.in_features for layer in linear[: 2 * len(ends) : 2] if layer is not layers[0]]
    activations = len(images) * sum(ends + begins) * pieces[0].element_size()
    weights = rows * sum(piece.nbytes for piece in pieces)
    expected = [  # axis, collective, how many, bytes that all ranks of a group send in a ring
        ("tp", "all_reduce", len(ends + begins), 2 * (columns - 1) * activations),
        ("dp", "all_gather", 2 * len(layers), 2 * (rows - 1) * weights),
        ("dp", "reduce_scatter", len(layers), (rows - 1) * weights),
    ]
    counts = {str(name).replace("_", ""): count for name, count in counted.get_comm_counts().items()}
    print("axis  collective      counted  predicted  bytes from each rank")
    for axis, name, number, total in expected:
        ranks = mesh[axis].size()
        found = sum(count for key, count in counts.items() if name.replace("_", "") in key)
        print(f"{axis:<6}{name:<16}{found:<9}{number * (ranks > 1):<11}{total // ranks:,}", flush=True)


def _chunk_like(mine: Tensor, whole: Tensor) -> Tensor:
    """Return the chunk of a tensor that this rank should have, by the shape of what it has."""
    for dim, (size, whole_size) in enumerate(zip(mine.shape, whole.shape, strict=True)):
        if size != whole_size:
            return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return whole
