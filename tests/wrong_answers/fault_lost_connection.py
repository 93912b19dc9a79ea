"""Wrong repairs of fault_lost_connection. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _step(model, images, labels):
    """Take one step, as the exercise does. Returns this rank's loss."""
    model.zero_grad()
    loss = F.mse_loss(model(images), labels)
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return loss.detach()


def waits_at_a_barrier(model, images, labels, limit):
    """HANG with 2 ranks ... rank 1 waits at your line ... dist.barrier()"""
    dist.init_process_group("gloo")
    steps = 0
    while steps < 20:
        steps += 1
        if _step(model, images, labels) < limit:
            break
    dist.barrier()
    dist.destroy_process_group()
    return steps


def never_stops(model, images, labels, limit):
    """WRONG with 1 rank ... the number of steps: 20 ... Is the limit checked?"""
    dist.init_process_group("gloo")
    for _ in range(20):
        _step(model, images, labels)
    dist.destroy_process_group()
    return 20


def rank_0_decides(model, images, labels, limit):
    """WRONG with 2 ranks ... the loss of rank 0 is below the limit, but the mean is not."""
    dist.init_process_group("gloo")
    steps = 0
    while steps < 20:
        steps += 1
        loss = _step(model, images, labels)
        dist.broadcast(loss, src=0)
        if loss < limit:
            break
    dist.destroy_process_group()
    return steps


def the_smallest_loss(model, images, labels, limit):
    """WRONG with 2 ranks ... the loss of rank 1 is below the limit, but the mean is not."""
    dist.init_process_group("gloo")
    steps = 0
    while steps < 20:
        steps += 1
        loss = _step(model, images, labels)
        dist.all_reduce(loss, op=dist.ReduceOp.MIN)
        if loss < limit:
            break
    dist.destroy_process_group()
    return steps


def the_sum(model, images, labels, limit):
    """WRONG with 2 ranks ... the sum of the losses is below the limit, but their"""
    dist.init_process_group("gloo")
    steps = 0
    while steps < 20:
        steps += 1
        loss = _step(model, images, labels)
        dist.all_reduce(loss)
        if loss < limit:
            break
    dist.destroy_process_group()
    return steps


def ignores_the_error(model, images, labels, limit):
    """WRONG with 2 ranks ... The ranks have taken different numbers of steps:"""
    dist.init_process_group("gloo")
    steps = 0
    while steps < 20:
        steps += 1
        try:
            loss = _step(model, images, labels)
        except RuntimeError:
            break
        if loss < limit:
            break
    dist.destroy_process_group()
    return steps


def stays_in_the_group(model, images, labels, limit):
    """WRONG with 1 rank ... A rank must leave the group before its program ends."""
    dist.init_process_group("gloo")
    steps = 0
    while steps < 20:
        steps += 1
        loss = _step(model, images, labels)
        dist.all_reduce(loss)
        if loss / dist.get_world_size() < limit:
            break
    return steps
