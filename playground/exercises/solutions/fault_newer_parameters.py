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
        # With NCCL, the messages of two ranks share one communicator and run in order, so both
        # ranks could wait for ever if both send first. A batch starts its operations together.
        operations = [
            dist.P2POp(dist.isend, message, right),
            dist.P2POp(dist.irecv, received, left),
        ]
        requests = dist.batch_isend_irecv(operations)
        parameters -= 0.5 * gradient(parameters)
        for request in requests:
            request.wait()
        parameters += received
        parameters /= 2
