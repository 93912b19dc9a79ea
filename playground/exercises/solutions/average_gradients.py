"""Why: all ranks send zeros for a missing gradient, so their messages have the same length."""

from collections import defaultdict

import torch
import torch.distributed as dist


def average_gradients(model):
    """Replace the gradient of each parameter with its mean over all ranks."""
    buckets = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            buckets[parameter.dtype].append(parameter)
    for parameters in buckets.values():
        parts = []
        flags = []  # 1 where this rank has a gradient
        for parameter in parameters:
            missing = parameter.grad is None
            gradient = torch.zeros_like(parameter) if missing else parameter.grad
            parts.append(gradient.flatten())
            flags.append(0.0 if missing else 1.0)
        message = torch.cat([*parts, parts[0].new_tensor(flags)])
        message /= dist.get_world_size()  # before the sum, which may be too large for float16
        dist.all_reduce(message)
        sizes = [len(part) for part in parts]
        *means, flags = message.split([*sizes, len(sizes)])
        for parameter, mean, flag in zip(parameters, means, flags.tolist(), strict=True):
            if flag > 0:
                parameter.grad = mean.view_as(parameter)
