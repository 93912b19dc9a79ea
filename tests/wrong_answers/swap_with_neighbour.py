"""Wrong answers to swap_with_neighbour. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _neighbour():
    """Return the neighbour of this rank; None if it has none."""
    rank = dist.get_rank()
    other = rank + 1 if rank % 2 == 0 else rank - 1
    return None if other == dist.get_world_size() else other


def both_send_first(tensor):
    """HANG with 2 ranks ... rank 1 waits at your line ... dist.send ... Every rank waits in send"""
    if _neighbour() is None:
        return tensor
    received = torch.empty_like(tensor)
    dist.send(tensor, _neighbour())
    dist.recv(received, _neighbour())
    return received


def both_receive_first(tensor):
    """HANG with 2 ranks ... dist.recv ... Rank 0 waits for a message that rank 1 has not sent."""
    if _neighbour() is None:
        return tensor
    received = torch.empty_like(tensor)
    dist.recv(received, _neighbour())
    dist.send(tensor, _neighbour())
    return received


def even_only(tensor):
    """CRASH with 1 rank ... there is no rank 1 ... dist.send ... right for even numbers of ranks"""
    rank = dist.get_rank()
    received = torch.empty_like(tensor)
    if rank % 2 == 0:
        dist.send(tensor, rank + 1)
        dist.recv(received, rank + 1)
    else:
        dist.recv(received, rank - 1)
        dist.send(tensor, rank - 1)
    return received


def into_the_same_tensor(tensor):
    """WRONG with 2 ranks ... The tensor that was sent has changed"""
    if _neighbour() is None:
        return tensor
    if dist.get_rank() % 2 == 0:
        dist.send(tensor, _neighbour())
        dist.recv(tensor, _neighbour())
    else:
        received = torch.empty_like(tensor)
        dist.recv(received, _neighbour())
        dist.send(tensor, _neighbour())
        tensor.copy_(received)
    return tensor


def no_wait(tensor):
    """HANG with 2 ranks ... has finished ... Is wait() called for each request?"""
    if _neighbour() is None:
        return tensor
    received = torch.zeros_like(tensor)
    send_request = dist.isend(tensor, _neighbour())
    dist.irecv(received, _neighbour())
    result = received.clone()
    send_request.wait()
    return result


def returns_nothing(tensor):
    """WRONG with 1 rank ... rank 0, the returned tensor: None ... Return the tensor"""


def float_buffer(tensor):
    """CRASH with 2 ranks, 2 x 3 integers ... buffer has 24 bytes, but the message ... has 48"""
    if _neighbour() is None:
        return tensor
    received = torch.empty(tensor.shape)
    request = dist.isend(tensor, _neighbour())
    dist.recv(received, _neighbour())
    request.wait()
    return received


def twice(tensor):
    """COSTLY with 2 ranks ... rank 0 sends 32 bytes; 16 are enough: 2 times the bytes"""
    if _neighbour() is None:
        return tensor
    received = torch.empty_like(tensor)
    for _ in range(2):
        request = dist.isend(tensor, _neighbour())
        dist.recv(received, _neighbour())
        request.wait()
    return received


def keeps_the_last_one_out(tensor):
    """WRONG with 1 rank ... has no neighbour, so it should get its own tensor back ... right for"""
    if _neighbour() is None:
        return torch.zeros_like(tensor)
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, _neighbour())
    dist.recv(received, _neighbour())
    request.wait()
    return received
