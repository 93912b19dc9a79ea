"""What a step of the transformer keeps for backward(): counted, and by the formula."""

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from common.models import HEADS, LAYERS, TOKENS, WIDTH, Block
from measure.memory import Kept
from measure.messages import Messages

STEPS = 5  # of which the fastest counts


def kept_for_backward(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[int, Tensor]:
    """Run a forward pass. Returns the bytes that autograd keeps for it, and the loss.

    The parameters are in memory anyway, so they are left out.
    """
    with Kept(model) as kept:
        loss = F.cross_entropy(model(images), labels)
    return kept.nbytes(), loss


def by_formula(args: argparse.Namespace, images: int, wrapped: int) -> int:
    """Return the bytes that kept_for_backward should count on a CPU, without dropout.

    Args:
        args: has the flags of the transformer.
        images: how many there are in the batch.
        wrapped: how many blocks keep only their input.
    """
    width = args.width or WIDTH["transformer"]
    tokens = args.tokens or TOKENS
    heads = args.heads or HEADS
    blocks = args.layers or LAYERS["transformer"]
    # For each token, attention keeps the input of LayerNorm, its output, query, key and value, and
    # what was read. The MLP keeps the input of LayerNorm, its output, and four times as much before
    # and after GELU. Each LayerNorm keeps two more numbers, and attention one for each head.
    of_block = tokens * (16 * width + 4 + heads)
    numbers = wrapped * tokens * width + (blocks - wrapped) * of_block
    # The first layer keeps the image. The last one keeps the output of the last block, the last
    # token after LayerNorm, with two more numbers, and 10 scores.
    numbers += 784 + tokens * width + width + 2 + 10
    size = 8 if args.double else 4
    labels = 8 * images
    return images * numbers * size + labels + size  # and the sum of the labels' weights


def synchronize(tensor: Tensor) -> None:
    """Wait until the GPU of a tensor has done its work, if it is on a GPU."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def measured_step(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[int, int, float]:
    """Run some steps without an optimizer.

    Returns the bytes that one of them keeps for backward(), how many forward passes of blocks it
    has begun, and the seconds of the fastest.
    """
    passes = []

    def note(block: nn.Module, inputs: tuple) -> None:
        """PyTorch calls this before the forward pass of a block."""
        passes.append(block)

    blocks = [layer for layer in model.modules() if isinstance(layer, Block)]
    hooks = [block.register_forward_pre_hook(note) for block in blocks]
    seconds = []
    for _ in range(STEPS):
        passes.clear()
        model.zero_grad()
        synchronize(images)
        start = time.perf_counter()
        kept, loss = kept_for_backward(model, images, labels)
        loss.backward()
        synchronize(images)
        seconds.append(time.perf_counter() - start)
    for hook in hooks:
        hook.remove()
    return kept, len(passes), min(seconds)


def show_steps(
    args: argparse.Namespace,
    models: dict[str, tuple[nn.Module, int]],
    images: Tensor,
    labels: Tensor,
) -> None:
    """Run some steps of each model, and print what they keep and how long they take.

    All ranks call it, so that none waits for another. Rank 0 prints.

    Args:
        args: has the flags of the transformer.
        models: for each name a transformer, and how many of its blocks keep only their input.
        images, labels: a batch of this rank, (B, 1, 28, 28) and int64 (B,), on its device.
    """
    first = dist.get_rank() == 0
    if first:
        print("blocks   bytes kept  predicted   passes  a step")
    for name, (model, wrapped) in models.items():
        predicted = f"{by_formula(args, len(images), wrapped):,}"
        if images.is_cuda:
            predicted = "on CPUs"  # attention keeps other numbers on GPUs
        kept, passes, seconds = measured_step(model.to(images.device), images, labels)
        row = f"{name:<9}{kept:<12,}{predicted:<12}{passes:<8}{1000 * seconds:.0f} ms"
        if first:
            print(row, flush=True)


def show_gathers(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Compute gradients once more, and print how often FSDP gathers its layers.

    All ranks call it, and rank 0 prints.

    Args:
        model: sharded by fully_shard.
        images, labels: a batch of this rank, (B, 1, 28, 28) and int64 (B,), on the model's device.
    """
    for _ in range(2):  # the first step after a test gathers one layer more than the others
        model.zero_grad()
        with Messages() as forward:
            loss = F.cross_entropy(model(images), labels)
        with Messages() as backward:
            loss.backward()
    if dist.get_rank() == 0:
        layers = len(model.stage1) + len(model.stage2)
        counted = [len(messages.of("all_gather")) for messages in (forward, backward)]
        in_forward, in_backward = counted
        where = f"in forward: {in_forward}, in backward: {in_backward}"
        print(f"all_gather {where}, for {layers} layers", flush=True)
