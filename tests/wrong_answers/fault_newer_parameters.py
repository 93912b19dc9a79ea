"""Wrong repairs of fault_newer_parameters. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _right():
    """Return the right neighbour of this rank."""
    return (dist.get_rank() + 1) % dist.get_world_size()


def _left():
    """Return the left neighbour of this rank."""
    return (dist.get_rank() - 1) % dist.get_world_size()


def waits_right_away(parameters, gradient, steps):
    """HANG with 2 ranks ... request.wait() ... has not received a message from rank"""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        request = dist.isend(parameters, _right())
        request.wait()
        parameters -= 0.5 * gradient(parameters)
        dist.recv(received, _left())
        parameters += received
        parameters /= 2


def blocking(parameters, gradient, steps):
    """HANG with 2 ranks ... dist.send ... Every rank waits in send until its message is"""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        dist.send(parameters, _right())
        parameters -= 0.5 * gradient(parameters)
        dist.recv(received, _left())
        parameters += received
        parameters /= 2


def with_a_barrier(parameters, gradient, steps):
    """WRONG with 2 ranks ... After a barrier all ranks have called isend, but the numbers may"""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        request = dist.isend(parameters, _right())
        dist.barrier()
        parameters -= 0.5 * gradient(parameters)
        dist.recv(received, _left())
        request.wait()
        parameters += received
        parameters /= 2


def receives_first(parameters, gradient, steps):
    """WRONG with 2 ranks ... , the parameters: ["""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        request = dist.isend(parameters, _right())
        dist.recv(received, _left())
        parameters -= 0.5 * gradient(parameters)
        request.wait()
        parameters += received
        parameters /= 2


def sends_after_the_step(parameters, gradient, steps):
    """WRONG with 2 ranks, 1 step ... Rank 0 has received the parameters that rank 1 has after"""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        parameters -= 0.5 * gradient(parameters)
        request = dist.isend(parameters, _right())
        dist.recv(received, _left())
        request.wait()
        parameters += received
        parameters /= 2


def mean_first(parameters, gradient, steps):
    """WRONG with 2 ranks ... This would be right if the mean came first, and the step after it."""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        request = dist.isend(parameters, _right())
        dist.recv(received, _left())
        request.wait()
        parameters += received
        parameters /= 2
        parameters -= 0.5 * gradient(parameters)


def not_in_place(parameters, gradient, steps):
    """WRONG with 2 ranks ... The tensor of the caller has not changed."""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        request = dist.isend(parameters, _right())
        stepped = parameters - 0.5 * gradient(parameters)
        dist.recv(received, _left())
        request.wait()
        parameters = (stepped + received) / 2


def the_copy_is_trained(parameters, gradient, steps):
    """WRONG with 2 ranks ... Change the parameters in place, and return nothing."""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        message = parameters.clone()
        request = dist.isend(message, _right())
        parameters = parameters - 0.5 * gradient(parameters)
        dist.recv(received, _left())
        request.wait()
        parameters = (parameters + received) / 2
    return parameters


def sends_twice(parameters, gradient, steps):
    """COSTLY with 2 ranks ... right numbers, but rank 0 sends 16 bytes; 8 are enough"""
    received = torch.empty_like(parameters)
    for _ in range(steps):
        message = parameters.clone()
        requests = [dist.isend(message, _right()), dist.isend(message, _right())]
        parameters -= 0.5 * gradient(parameters)
        for request in requests:
            dist.recv(received, _left())
            request.wait()
        parameters += received
        parameters /= 2


def the_step_comes_last(parameters, gradient, steps):
    """WRONG with 2 ranks, 1 step rank 0, rank 1 takes its first step: after it has received ... The
    step comes before wait()
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    received = torch.empty_like(parameters)
    for _ in range(steps):
        request = dist.isend(parameters, (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        request.wait()
        parameters -= 0.5 * gradient(parameters)
        parameters += received
        parameters /= 2
