"""Wrong answers to ring_all_reduce. Each docstring begins with words of the verdict it must get."""

import torch
import torch.distributed as dist


def _ring(tensor, steps):
    """Add up in a ring, in so many steps of each phase. Returns the chunks, the rank and n."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    right = (rank + 1) % n
    left = (rank - 1) % n
    chunks = tensor.view(-1).tensor_split(n)
    for step in range(steps):
        keep = chunks[(rank - step - 1) % n]
        received = torch.empty_like(keep)
        request = dist.isend(chunks[(rank - step) % n], right)
        dist.irecv(received, left).wait()
        request.wait()
        keep.add_(received)
    for step in range(steps):
        request = dist.isend(chunks[(rank - step + 1) % n], right)
        dist.irecv(chunks[(rank - step) % n], left).wait()
        request.wait()


def averaged(tensor):
    """WRONG with 2 ranks ... what is expected, divided by 2: averaged, but not added up?"""
    n = dist.get_world_size()
    _ring(tensor, n - 1)
    tensor.div_(n)


def too_few_steps(tensor):
    """WRONG with 2 ranks ... chunk never arrived ... 2(n - 1) = 2 steps, not 0?"""
    _ring(tensor, max(dist.get_world_size() - 2, 0))


def built_in(tensor):
    """WRONG with 1 rank ... dist.all_reduce is what this exercise builds: use batch_isend"""
    dist.all_reduce(tensor)


def no_wait(tensor):
    """WRONG with 2 ranks ... numbers are missing ... and is wait() called for each request?"""
    rank = dist.get_rank()
    n = dist.get_world_size()
    _ring(tensor, n - 1)
    if n > 1:
        # The last message again, but this time its end is not waited for.
        chunks = tensor.view(-1).tensor_split(n)
        received = chunks[(rank + 2) % n]
        received.zero_()
        dist.isend(chunks[(rank + 3) % n].clone(), (rank + 1) % n)
        dist.irecv(received, (rank - 1) % n)


def wrong_chunk(tensor):
    """WRONG with 2 ranks, 60 numbers ... rank 1's numbers are missing at position 0. Is each chunk
    sent in the right step, and is wait()"""
    rank = dist.get_rank()
    n = dist.get_world_size()
    whole = tensor.clone()
    _ring(whole, n - 1)
    # The first phase as it should be: afterwards chunk rank + 1 is the sum over all ranks.
    chunks = tensor.view(-1).tensor_split(n)
    done = (rank + 1) % n
    chunks[done].copy_(whole.view(-1).tensor_split(n)[done])
    for step in range(n - 1):
        request = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.irecv(chunks[(rank - step - 1) % n], (rank - 1) % n).wait()
        request.wait()


def to_itself(tensor):
    """CRASH with 1 rank, 60 numbers rank 0: ValueError: rank 0 sends to itself: there is no other
    rank ... dist.isend"""
    rank = dist.get_rank()
    n = dist.get_world_size()
    received = torch.empty_like(tensor)
    request = dist.isend(tensor, (rank + 1) % n)
    dist.irecv(received, (rank - 1) % n).wait()
    request.wait()


def whole_tensors(tensor):
    """COSTLY with 3 ranks ... Each message is the whole tensor."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    travelling = tensor.clone()
    for _ in range(n - 1):
        received = torch.empty_like(tensor)
        request = dist.isend(travelling, (rank + 1) % n)
        dist.irecv(received, (rank - 1) % n).wait()
        request.wait()
        tensor.add_(received)
        travelling = received


def equal_chunks(tensor):
    """CRASH with 2 ranks ... is invalid for input of size 7 ... chunks = tensor.view(n, -1)"""
    n = dist.get_world_size()
    chunks = tensor.view(n, -1)
    if n > 1:
        _ring(chunks, n - 1)


def all_send_first(tensor):
    """HANG with 2 ranks ... rank 0 waits at your line ... dist.send ... Which rank receives?"""
    rank = dist.get_rank()
    n = dist.get_world_size()
    if n > 1:
        dist.send(tensor, (rank + 1) % n)
        dist.recv(tensor, (rank - 1) % n)


def early(tensor):
    """HANG with 2 ranks ... rank 0 has finished ... waits for a message that rank 0 has not sent"""
    if dist.get_rank() > 0:
        _ring(tensor, dist.get_world_size() - 1)
