"""Why: an expert has the sum of the gradients already. It only has to become a mean."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def train(model, tokens, goals, steps):
    """Train on this rank's tokens. Each parameter gets a gradient on all ranks."""
    for _ in range(steps):
        model.zero_grad()
        F.mse_loss(model(tokens), goals).backward()
        for name, parameter in model.named_parameters():
            if not name.startswith("experts."):
                dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
