"""Why: numel() is the same on all ranks, so all ranks send the gradients in the same order."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def train(model, images, labels, steps):
    """Train on this rank's images. The same parameters have a gradient on all ranks."""
    for _ in range(steps):
        model.zero_grad()
        F.mse_loss(model(images), labels).backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        # The gradients with the most numbers travel first.
        trained.sort(key=lambda parameter: parameter.numel(), reverse=True)
        for parameter in trained:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in trained:
                parameter -= 0.01 * parameter.grad
