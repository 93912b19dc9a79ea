"""What mixed precision changes: the dtypes of a step, its error, and its messages."""

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from measure.messages import Messages


def show_errors(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Print how far a step is from the same step in float64, for each way to compute it.

    Args:
        model: on a single device, and whole. It is copied, and not changed.
        images, labels: a batch, (B, 1, 28, 28) and int64 (B,).
    """
    device = next(model.parameters()).device
    images = images.to(device)
    labels = labels.to(device)
    model = copy.deepcopy(model).float()
    right, gradients = _step(model.double(), images.double(), labels)
    model = model.float()
    images = images.float()
    bfloat16 = torch.autocast(device.type, torch.bfloat16)
    float16 = torch.autocast(device.type, torch.float16)
    whole = copy.deepcopy(model).bfloat16()
    ways = {
        "float32": (model, images, contextlib.nullcontext()),
        "bfloat16, autocast": (model, images, bfloat16),
        "bfloat16, everything": (whole, images.bfloat16(), contextlib.nullcontext()),
        "float16, autocast": (model, images, float16),
    }
    print("error against float64   loss     gradients")
    for name, (computes, inputs, context) in ways.items():
        loss, found = _step(computes, inputs, labels, context)
        of_loss = abs(loss - right) / right
        of_gradients = (found - gradients).norm() / gradients.norm()
        print(f"{name:<24}{of_loss:<9.0e}{of_gradients:.0e}", flush=True)


def _step(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    context: Any = contextlib.nullcontext(),  # noqa: B008, it has no state
) -> tuple[float, Tensor]:
    """Return the loss of a step, and all gradients as one tensor of float64."""
    model.zero_grad()
    with context:
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    gradients = [parameter.grad.double().flatten() for parameter in model.parameters()]
    return loss.item(), torch.cat(gradients)


def show_dtypes(
    model: nn.Module, optimizer: Optimizer, autocast: Any, images: Tensor, labels: Tensor
) -> None:
    """Run a forward pass, and print the dtype of what each kind of layer returns, and of the rest.

    All ranks call it, and rank 0 prints. For several layers of a kind, the first one counts.

    Args:
        model: has computed its gradients, which are still there.
        optimizer: Adam, which has made a step.
        autocast: the context in which the model computes.
        images, labels: a batch of this rank, (B, 1, 28, 28) and int64 (B,), on the model's device.
    """
    found = {}

    def note(layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        name = type(layer).__name__.removeprefix("FSDP")  # which fully_shard puts in front
        found.setdefault(name, output.dtype)

    layers = [*model.stage1.modules(), *model.stage2.modules()]
    hooks = [layer.register_forward_hook(note) for layer in layers]
    with autocast, torch.no_grad():
        logits = model(images)
        found["logits"] = logits.dtype
        found["softmax"] = logits.softmax(dim=1).dtype
        found["loss"] = F.cross_entropy(logits, labels).dtype
    for hook in hooks:
        hook.remove()
    found.pop("Sequential", None)
    parameter = next(model.parameters())
    found["parameters"] = parameter.dtype
    found["gradients"] = parameter.grad.dtype
    found["Adam's averages"] = optimizer.state[parameter]["exp_avg"].dtype
    if dist.get_rank() > 0:
        return
    for dtype in sorted(set(found.values()), key=lambda each: each.itemsize):
        names = [name for name, each in found.items() if each == dtype]
        print(f"{str(dtype).removeprefix('torch.')}: {', '.join(names)}", flush=True)


def show_bytes(
    model: nn.Module,
    autocast: Any,
    images: Tensor,
    labels: Tensor,
    sharded: bool,
    narrow: torch.dtype | None,
) -> None:
    """Compute gradients once more, and print the bytes that each rank sends, and the formulas'.

    All ranks call it, and rank 0 prints.

    Args:
        model: wrapped by DDP, or sharded by fully_shard.
        autocast: the context in which the model computes.
        images, labels: a batch of this rank, (B, 1, 28, 28) and int64 (B,), on the model's device.
        sharded: whether fully_shard has sharded it.
        narrow: the dtype in which fully_shard gathers parameters; None: their own.
    """
    for _ in range(2):  # the first step after a test gathers one layer more than the others
        model.zero_grad()
        with Messages() as messages:
            with autocast:
                loss = F.cross_entropy(model(images), labels)
            loss.backward()
    if dist.get_rank() > 0:
        return
    size = sum(parameter.nbytes for parameter in model.parameters())
    ranks = dist.get_world_size()
    predicted = {"all_reduce": 2 * size}
    if sharded:
        gathered = size
        if narrow is not None:
            gathered = sum(parameter.numel() * narrow.itemsize for parameter in model.parameters())
        predicted = {"all_gather": 2 * gathered, "reduce_scatter": size}
    for kind, nbytes in predicted.items():
        sent = messages.sent(kind)
        formula = nbytes * (ranks - 1) / ranks
        print(f"bytes sent by {kind}: {sent:,.0f} (predicted: {formula:,.0f})", flush=True)
