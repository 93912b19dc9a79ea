"""Wrong repairs of fault_mixed_gradients. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _backward(model, images, labels):
    """Compute the gradients. Returns the parameters that have one."""
    model.zero_grad()
    F.mse_loss(model(images), labels).backward()
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def _largest_first(trained):
    """Return parameters in the order of the exercise."""
    return sorted(trained, key=lambda parameter: parameter.grad.norm(), reverse=True)


def _step(trained):
    """Change parameters by their gradients."""
    with torch.no_grad():
        for parameter in trained:
            parameter -= 0.01 * parameter.grad


def with_barriers(model, images, labels, steps):
    """WRONG with 2 ranks ... gradient of ... A barrier does not change which calls meet."""
    for _ in range(steps):
        trained = _largest_first(_backward(model, images, labels))
        for parameter in trained:
            dist.barrier()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        _step(trained)


def waits_at_the_end(model, images, labels, steps):
    """WRONG with 2 ranks ... 0.weight changes by rank 1's gradient of 1.weight."""
    for _ in range(steps):
        trained = _largest_first(_backward(model, images, labels))
        requests = []
        for parameter in trained:
            parameter.grad /= dist.get_world_size()
            requests.append(dist.all_reduce(parameter.grad, async_op=True))
        for request in requests:
            request.wait()
        _step(trained)


def in_one_message(model, images, labels, steps):
    """WRONG with 2 ranks ... gradient of ... In which order are the gradients in the message?"""
    for _ in range(steps):
        trained = _largest_first(_backward(model, images, labels))
        message = torch.cat([parameter.grad.flatten() for parameter in trained])
        dist.all_reduce(message)
        message /= dist.get_world_size()
        sizes = [parameter.numel() for parameter in trained]
        for parameter, mean in zip(trained, message.split(sizes), strict=True):
            parameter.grad.copy_(mean.view_as(parameter))
        _step(trained)


def the_largest_only(model, images, labels, steps):
    """WRONG with 2 ranks ... changes by this rank's own gradient only."""
    for _ in range(steps):
        trained = _backward(model, images, labels)
        dist.all_reduce(trained[-1].grad)
        trained[-1].grad /= dist.get_world_size()
        _step(trained)


def not_divided(model, images, labels, steps):
    """WRONG with 2 ranks ... 0.weight changes by the sum of the ranks' gradients, and not"""
    for _ in range(steps):
        trained = _backward(model, images, labels)
        for parameter in trained:
            dist.all_reduce(parameter.grad)
        _step(trained)


def frozen_ones_too(model, images, labels, steps):
    """CRASH with 1 rank, frozen, tied and unused parameters ... frozen or not used has no"""
    for _ in range(steps):
        _backward(model, images, labels)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        _step(model.parameters())
