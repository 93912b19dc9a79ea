"""Wrong answers to all_gather. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _around_the_ring(chunk, steps, waits=True):
    """Return the chunks of all ranks in the order of their arrival, after so many steps."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    arrived = [chunk]
    for _ in range(steps):
        received = torch.zeros_like(chunk)
        request = dist.isend(arrived[-1], (rank + 1) % n)
        receive_request = dist.irecv(received, (rank - 1) % n)
        if waits:
            receive_request.wait()
        arrived.append(received.clone())
        request.wait()
    return arrived


def in_the_order_of_arrival(chunk):
    """WRONG with 2 ranks ... rank 1 has ... The chunks are in the order of ranks 1, 0."""
    return torch.cat(_around_the_ring(chunk, dist.get_world_size() - 1))


def one_step_too_few(chunk):
    """WRONG with 3 ranks ... The chunk of rank 1 is missing."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    chunks = [torch.zeros_like(chunk) for _ in range(n)]
    for step, arrived in enumerate(_around_the_ring(chunk, min(n - 1, 1))):
        chunks[(rank - step) % n] = arrived
    return torch.cat(chunks)


def no_wait(chunk):
    """WRONG with 2 ranks ... The chunk of rank ... is missing. Is wait() called for each"""
    rank = dist.get_rank()
    n = dist.get_world_size()
    chunks = [chunk] * n
    for step, arrived in enumerate(_around_the_ring(chunk, n - 1, waits=False)):
        chunks[(rank - step) % n] = arrived
    return torch.cat(chunks)


def no_wait_for_the_collective(chunk):
    """WRONG with ... wait()"""
    copies = chunk.repeat(dist.get_world_size())
    received = torch.zeros_like(copies)
    request = dist.all_to_all_single(received, copies, async_op=True)
    chunk.kept = request
    return received


def float_buffer(chunk):
    """WRONG with 1 rank, 3 integers in each chunk ... numbers of torch.float32 ... empty_like"""
    n = dist.get_world_size()
    received = torch.empty(n * len(chunk))
    dist.all_to_all_single(received, chunk.float().repeat(n))
    return received


def a_list(chunk):
    """WRONG with 1 rank ... rank 0 has [[1, 2]] expected a tensor of shape (2,)"""
    n = dist.get_world_size()
    received = torch.empty_like(chunk.repeat(n))
    dist.all_to_all_single(received, chunk.repeat(n))
    return list(received.chunk(n))


def grows_on_its_way(chunk):
    """COSTLY with 3 ranks ... 24 bytes; 16 are enough ... A message carries more than one chunk."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    known = chunk
    for _ in range(n - 1):
        received = torch.empty_like(known)
        request = dist.isend(known, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        request.wait()
        known = torch.cat([received, chunk])
    chunks = known.chunk(n)
    return torch.cat([chunks[(other - rank - 1) % n] for other in range(n)])


def built_in(chunk):
    """WRONG with 1 rank ... dist.all_gather_into_tensor is what this exercise builds"""
    received = torch.empty_like(chunk.repeat(dist.get_world_size()))
    dist.all_gather_into_tensor(received, chunk)
    return received


def in_the_same_order(chunk):
    """HANG with 2 ranks ... Every rank waits in send until its message is received."""
    n = dist.get_world_size()
    chunks = [chunk.clone() for _ in range(n)]
    for other in range(n):
        if other != dist.get_rank():
            dist.send(chunk, other)
    for other in range(n):
        if other != dist.get_rank():
            dist.recv(chunks[other], other)
    return torch.cat(chunks)
