"""How swap_with_neighbour is checked."""

import torch
import torch.distributed as dist
from verdicts import difference

CASES = {
    "4 numbers": {"shape": (4,), "dtype": torch.float32},
    "2 x 3 integers": {"shape": (2, 3), "dtype": torch.int64},
}
ONLY = ("send", "recv")
INSTEAD = "use send and recv, or isend and irecv"
EXACT = {"rtol": 0, "atol": 0}


def tensor_of(rank, shape, dtype):
    """Return the tensor of a rank."""
    count = torch.Size(shape).numel()
    return (10**rank * torch.arange(1, count + 1)).to(dtype).view(shape)


def neighbour(rank, world_size):
    """Return the neighbour of a rank, or the rank itself if it has none."""
    other = rank + 1 if rank % 2 == 0 else rank - 1
    return other if other < world_size else rank


def run(swap_with_neighbour, shape, dtype):
    """Call the learner's function on this rank."""
    tensor = tensor_of(dist.get_rank(), shape, dtype)
    returned = swap_with_neighbour(tensor)
    return {"the returned tensor": returned, "the tensor that was sent": tensor}


def expected(rank, world_size, shape, dtype):
    """Return what run() should return."""
    returned = tensor_of(neighbour(rank, world_size), shape, dtype)
    return {
        "the returned tensor": returned,
        "the tensor that was sent": tensor_of(rank, shape, dtype),
    }


def limits(rank, world_size, shape, dtype):
    """Return how much a rank may send: its tensor, if it has a neighbour."""
    messages = 0 if neighbour(rank, world_size) == rank else 1
    return {"messages": messages, "bytes": messages * tensor_of(rank, shape, dtype).nbytes}


def explain(outcome):
    """Put typical mistakes into words."""
    if outcome.verdict != "WRONG":
        return None
    actual, right = outcome.of_rank()
    returned = actual["the returned tensor"]
    sent = actual["the tensor that was sent"]
    own = right["the tensor that was sent"]
    if returned is None:
        return "Return the tensor that was received."
    if difference(sent, own, EXACT):
        return "The tensor that was sent has changed. Receive into a separate buffer."
    if neighbour(outcome.rank, outcome.world_size) == outcome.rank:
        return f"Rank {outcome.rank} has no neighbour, so it should get its own tensor back."
    if not difference(returned, own, EXACT):
        return f"Rank {outcome.rank} gets its own tensor back, and not that of its neighbour."
    if not any(message.kind == "recv" for message in outcome.messages[outcome.rank]):
        return f"Rank {outcome.rank} receives no message."
    for rank in range(outcome.world_size):
        if not difference(returned, tensor_of(rank, **outcome.case), EXACT):
            return f"This is the tensor of rank {rank}."
    return "Is the buffer read before wait() has returned?"
