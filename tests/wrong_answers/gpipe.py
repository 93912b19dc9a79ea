"""Wrong answers to gpipe. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _gpipe(stage, inputs, labels, shape, dtype, part=None, between=None, **others):
    """Compute a step. `part` is this micro-batch's part of the loss. `others` are small faults."""
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    rows = sum(len(each) for each in labels)
    received = list(inputs)
    outputs = []
    for number in range(len(inputs)):
        if rank > 0:
            received[number] = _receive(len(inputs[number]), shape, dtype, rank - 1, **others)
        output = stage(received[number])
        if rank < last:
            message = output.detach()
            if others.get("contiguous", True):
                message = message.contiguous()
            if "copies" in others:
                message = torch.cat([message] * others["copies"])
            dist.send(message, rank + 1)
        elif part:
            output = part(output, labels[number])
        else:
            output = F.cross_entropy(output, labels[number], reduction="sum") / rows
        outputs.append(output)
    for number, output in enumerate(outputs):
        gradient = torch.ones(output.shape, dtype=output.dtype)
        if rank < last:
            dist.recv(gradient, rank + 1)
        if between:
            between(stage)
        if output.requires_grad or not others.get("frozen", True):
            output.backward(gradient)
        if rank > 0:
            dist.send(received[number].grad, rank - 1)


def _receive(rows, shape, dtype, source, **faults):
    """Receive a micro-batch."""
    if faults.get("float32", False):
        dtype = torch.float32
    buffer = torch.empty(rows * faults.get("copies", 1), *shape, dtype=dtype)
    dist.recv(buffer, source)
    return buffer[:rows].clone().requires_grad_(faults.get("learn", True))


def sum_of_means(stage, inputs, labels, shape, dtype):
    """WRONG with 1 rank, 2, 2 and 2 rows ... the sum of the micro-batches' mean losses. The loss"""
    _gpipe(stage, inputs, labels, shape, dtype, F.cross_entropy)


def mean_of_means(stage, inputs, labels, shape, dtype):
    """WRONG with 1 rank, 3, 3 and 1 rows ... the mean of the micro-batches' mean losses. The last
    micro-batch has fewer rows, so it must count less.
    """

    def part(output, targets):
        return F.cross_entropy(output, targets) / len(labels)

    _gpipe(stage, inputs, labels, shape, dtype, part)


def sum_over_rows(stage, inputs, labels, shape, dtype):
    """WRONG with 1 rank, 2, 2 and 2 rows ... gradients of the sum over all rows, not of the mean"""

    def part(output, targets):
        return F.cross_entropy(output, targets, reduction="sum")

    _gpipe(stage, inputs, labels, shape, dtype, part)


def gradients_begin_again(stage, inputs, labels, shape, dtype):
    """WRONG with 1 rank, 2, 2 and 2 rows ... Only the last micro-batch is in the gradients."""
    _gpipe(stage, inputs, labels, shape, dtype, between=torch.nn.Module.zero_grad)


def no_gradient_for_the_buffer(stage, inputs, labels, shape, dtype):
    """CRASH with 2 ranks, 2, 2 and 2 rows rank 1: ... Was requires_grad_() called for what was"""
    _gpipe(stage, inputs, labels, shape, dtype, learn=False)


def float32_buffers(stage, inputs, labels, shape, dtype):
    """CRASH with 2 ranks, integers as inputs, float64 rank 1: its buffer has ... Has the buffer the
    shape and the dtype of the message
    """
    _gpipe(stage, inputs, labels, shape, dtype, float32=True)


def not_contiguous(stage, inputs, labels, shape, dtype):
    """CRASH with 2 ranks, integers as inputs, float64 ... send needs a contiguous tensor"""
    _gpipe(stage, inputs, labels, shape, dtype, contiguous=False)


def frozen_stages(stage, inputs, labels, shape, dtype):
    """CRASH with 2 ranks, the first 3 layers are frozen rank 0: RuntimeError: ... If this stage and
    all before it are frozen, the output requires no gradient
    """
    _gpipe(stage, inputs, labels, shape, dtype, frozen=False)


def no_gradient_to_begin_with(stage, inputs, labels, shape, dtype):
    """CRASH with 2 ranks, 2, 2 and 2 rows rank 0: RuntimeError: ... Only the last rank has a
    loss."""
    if dist.get_rank() == dist.get_world_size() - 1:
        _gpipe(stage, inputs, labels, shape, dtype)
        return
    for number in range(len(inputs)):
        output = stage(inputs[number])
        dist.send(output.detach().contiguous(), 1)
    output.backward()


def one_at_a_time(stage, inputs, labels, shape, dtype):
    """COSTLY with 3 ranks, 3, 3 and 1 rows right numbers, but in 12 rounds of messages; 8 are
    enough ... Compute all forward passes first.
    """
    rows = sum(len(each) for each in labels)

    def part(output, targets):
        return F.cross_entropy(output, targets, reduction="sum") / rows

    for images, targets in zip(inputs, labels, strict=True):
        _gpipe(stage, [images], [targets], shape, dtype, part)


def integers_learn(stage, inputs, labels, shape, dtype):
    """CRASH with 1 rank, integers as inputs, float64 rank 0: RuntimeError: ... They need no"""
    _gpipe(stage, [each.requires_grad_() for each in inputs], labels, shape, dtype)


def rank_0_never_sends(stage, inputs, labels, shape, dtype):
    """HANG with 2 ranks ... Rank 1 waits for a message that rank 0 has not sent."""
    if dist.get_rank() > 0 or dist.get_world_size() == 1:
        _gpipe(stage, inputs, labels, shape, dtype)


def forward_passes_twice(stage, inputs, labels, shape, dtype):
    """WRONG with 1 rank ... its forward passes: ... One forward pass for each micro-batch"""
    if dist.get_rank() == 0:
        for micro_batch in inputs:
            with torch.no_grad():
                stage(micro_batch)
    _gpipe(stage, inputs, labels, shape, dtype)


def gradients_begin_at_zero(stage, inputs, labels, shape, dtype):
    """WRONG with 1 rank, 1 micro-batch, earlier gradients ... The earlier gradients are gone"""
    stage.zero_grad()
    _gpipe(stage, inputs, labels, shape, dtype)


def everything_twice(stage, inputs, labels, shape, dtype):
    """COSTLY with 2 ranks, 3, 3 and 1 rows right numbers, but rank 0 sends ... Only the stage's
    output goes forward
    """
    _gpipe(stage, inputs, labels, shape, dtype, copies=2)
