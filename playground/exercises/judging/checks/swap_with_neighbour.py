"""How swap_with_neighbour is checked."""

import torch
import torch.distributed as dist
from judging.single import digits_of

CASES = {
    "4 numbers": {"shape": (4,), "dtype": torch.float32},
    "2 x 3 integers": {"shape": (2, 3), "dtype": torch.int64},
}
ONLY = ("send", "recv")
INSTEAD = "use send and recv, or isend and irecv"
STARTS = True
HINTS = """
If both neighbours send first, each of them waits until the other one receives. So one of them has
to receive first, or both have to start their messages without waiting.

torch.empty_like(tensor) makes a buffer of the same shape and dtype. dist.send(tensor, other) and
dist.recv(buffer, other) block. dist.isend and dist.irecv return a request with wait().

other = rank + 1 if rank is even, otherwise rank - 1.
If other is not a rank: return tensor.
If rank is even: send, then receive. Otherwise: receive, then send.
"""


def neighbour(rank, world_size):
    """Return the neighbour of a rank, or the rank itself if it has none."""
    other = rank + 1 if rank % 2 == 0 else rank - 1
    return other if other < world_size else rank


def run(swap_with_neighbour, rank, world_size, shape, dtype):
    tensor = digits_of(rank, shape, dtype)
    returned = swap_with_neighbour(tensor)
    return {"the returned tensor": returned, "the tensor that was sent": tensor}


def expected(rank, world_size, shape, dtype):
    theirs, own = (digits_of(each, shape, dtype) for each in (neighbour(rank, world_size), rank))
    return {"the returned tensor": theirs, "the tensor that was sent": own}


def limits(rank, world_size, shape, dtype):
    messages = 0 if neighbour(rank, world_size) == rank else 1
    return {"messages": messages, "bytes": messages * digits_of(rank, shape, dtype).nbytes}


def swap_with_neighbour(tensor):
    """Why: of two neighbours one sends first and the other receives first, so both calls return."""
    rank = dist.get_rank()
    other = rank + 1 if rank % 2 == 0 else rank - 1
    if other == dist.get_world_size():
        return tensor
    received = torch.empty_like(tensor)
    if rank % 2 == 0:
        dist.send(tensor, other)
        dist.recv(received, other)
    else:
        dist.recv(received, other)
        dist.send(tensor, other)
    return received


MISTAKES = {
    "Every rank waits in send until its message is received.": ("if rank % 2 == 0:", "if True:"),
    "Rank 0 waits for a message that rank 1 has not sent.": ("if rank % 2 == 0:", "if False:"),
    "the tensor that was sent: [10": ("return received", "return tensor.copy_(received)"),
}
