"""Find the fault: some ranks receive parameters that are a step ahead.

Lesson: nonblocking_p2p.py.

`train(parameters, gradient, steps)` trains a copy of the parameters on each of two or more ranks,
and pulls the copies together. In each step, a rank sends its parameters to its right neighbour and
receives those of its left neighbour. While they travel, it takes a step of its own. Then it
replaces its parameters with the mean of its own and the received ones:

    new = ((old - 0.5 * gradient(old)) + old of the left neighbour) / 2

But some ranks receive parameters with which the left neighbour has already taken its own step. Find
the fault, and repair train.

It is repaired if
- the parameters are right on all ranks after any number of steps;
- they are still changed in place, and nothing is returned;
- each rank sends its parameters once in each step, and nothing else.

The first check copies this file to `playground/exercises/answers/`. Repair the copy.

Check it. For help, add `--trace`, `--hint 1` (also 2 and 3) or `--answer`:
    python playground/exercises/fault_newer_parameters.py
"""

import torch
import torch.distributed as dist
from check import check


def train(parameters, gradient, steps):
    """Train a tensor in place. gradient(parameters) returns its gradient on this rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    received = torch.empty_like(parameters)
    for _ in range(steps):
        # With NCCL, the messages of two ranks share one communicator and run in order, so both
        # ranks could wait for ever if both send first. A batch starts its operations together.
        operations = [
            dist.P2POp(dist.isend, parameters, right),
            dist.P2POp(dist.irecv, received, left),
        ]
        requests = dist.batch_isend_irecv(operations)
        parameters -= 0.5 * gradient(parameters)
        for request in requests:
            request.wait()
        parameters += received
        parameters /= 2


if __name__ == "__main__":
    check(__file__)
