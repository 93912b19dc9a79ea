"""A step of three_axes.py: what it sends, beside a formula."""

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common.models import LAYERS, WIDTH
from figures.messages import Messages, sent_bytes


def show_axes(
    compute_gradients: Callable,
    batch: Sequence[Tensor],
    model: nn.Module,
    args: argparse.Namespace,
    mesh: DeviceMesh,
    flat: DeviceMesh,
) -> None:
    """Run a step of three_axes.py. Rank 0 prints its messages along each axis.

    All ranks must call this together.

    Args:
        compute_gradients: takes images and labels, and computes the gradients of the model.
        batch: the images and labels of this rank.
        model: what the lesson has trained.
        args: the flags of the lesson, with its number of tokens.
        mesh: has the axes "dp", "cp" and "tp".
        flat: has the axes "dp_cp" and "tp". Its groups carry what is not sent along "dp" or "cp".
    """
    batch = [part.to(mesh.device_type) for part in batch]
    compute_gradients(*batch)  # with --fsdp, the first step after a test gathers more than others
    with Messages() as messages:
        compute_gradients(*batch)
    if dist.get_rank() > 0:
        return
    dp_size, cp_size, tp_size = mesh.shape
    blocks = args.layers or LAYERS["transformer"]
    images = args.batch_size // dp_size
    chunks = torch.arange(args.tokens).tensor_split(2 * cp_size)
    own_tokens = len(chunks[0]) + len(chunks[-1])  # zigzag, of cp_rank 0
    next_tokens = len(chunks[1]) + len(chunks[-2])  # of the next rank of the ring
    width = args.width or WIDTH["transformer"]
    token = images * width * (8 if args.double else 4)  # bytes of a token, of all images
    pairs = 4 * blocks * own_tokens * token
    parameters = list(model.parameters())
    rows = []
    if args.fsdp:
        layers = blocks + 2
        kept = sum(parameter.to_local().nbytes for parameter in parameters)
        rows.append(("dp_cp", "all_gather", 2 * layers, 2 * kept))
        rows.append(("dp_cp", "reduce_scatter", layers, kept * dp_size * cp_size))
    else:
        kept = sum(parameter.nbytes for parameter in parameters)
        rows.append(("dp", "all_reduce", len(parameters), kept))
        rows.append(("cp", "all_reduce", len(parameters), kept))
    # Keys and values go around the ring twice, but not to the last rank, which is the next one.
    # Their gradients go around once, and arrive where they belong.
    sent_tokens = 3 * args.tokens - 2 * next_tokens
    sends = blocks * (3 * cp_size - 2)
    rows.append(("cp", "send", sends, blocks * sent_tokens * 2 * token // tp_size))
    if args.clip > 0:
        rows.append(("tp", "all_reduce", 4 * blocks + 1, pairs + parameters[0].itemsize))
    else:
        rows.append(("tp", "all_reduce", 4 * blocks, pairs))
    with_groups = []
    for axis, *row in rows:
        group = mesh.get_group(axis) if axis in ("dp", "cp") else flat.get_group(axis)
        if group.size() > 1:
            with_groups.append((axis, group, *row))
    print_messages(messages, with_groups)


def print_messages(messages: Messages, rows: Sequence) -> None:
    """Print a table of messages, counted and predicted.

    Args:
        messages: those of a step.
        rows: each has the name of an axis, its process group, a collective, how many of them a rank
            should call, and the bytes of all tensors that it should pass to them.
    """
    print("axis  collective      counted  predicted  bytes sent    predicted")
    for axis, group, collective, number, size in rows:
        counted = len(messages.of(collective, group.group_name))
        sent = messages.sent(collective, group.group_name)
        predicted = sent_bytes(collective, size, group.size())
        print(f"{axis:<6}{collective:<16}{counted:<9}{number:<11}{sent:<14,.0f}{predicted:,.0f}")
