"""Why: isend only starts the message, so it gets a copy that does not change while it travels."""

import torch
import torch.distributed as dist


def train(parameters, gradient, steps):
    """Train a tensor in place. gradient(parameters) returns its gradient on this rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    received = torch.empty_like(parameters)
    for _ in range(steps):
        message = parameters.clone()
        request = dist.isend(message, right)
        parameters -= 0.5 * gradient(parameters)
        dist.recv(received, left)
        request.wait()
        parameters += received
        parameters /= 2
