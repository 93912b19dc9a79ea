"""A step of a model whose linear layers are cut in pairs, beside the same step of the whole model."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
    if dist.get_rank() == 0:
        print("outputs differ from the whole model's by {:.0e}, gradients by {:.0e}".format(*furthest.tolist()))
        told = f"messages of a step: {forward.get_total_counts()} in forward, one for each of {pairs} pairs of layers; "
        told += f"{backward.get_total_counts()} in backward, the same" + " but for the gradient of images" * first
        print(told, flush=True)
    model.zero_grad()


def _chunk_like(mine: Tensor, whole: Tensor) -> Tensor:
    """Return the chunk of a tensor that this rank should have, by the shape of what it has."""
    for dim, (size, whole_size) in enumerate(zip(mine.shape, whole.shape, strict=True)):
        if size != whole_size:
            return whole.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return whole
