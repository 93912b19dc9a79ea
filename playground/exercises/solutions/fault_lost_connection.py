"""Why: the mean of the losses is the same on all ranks, so all leave the group at the same step."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def train(model, images, labels, limit):
    """Train on this rank's images, at most 20 steps. Returns the number of steps."""
    dist.init_process_group("gloo")
    steps = 0
    while steps < 20:
        steps += 1
        model.zero_grad()
        loss = F.mse_loss(model(images), labels)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        mean_loss = loss.detach()
        dist.all_reduce(mean_loss)
        mean_loss /= dist.get_world_size()
        if mean_loss < limit:
            break
    dist.destroy_process_group()
    return steps
