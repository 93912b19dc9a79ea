"""How all_gather is checked."""

import torch
import torch.distributed as dist
from verdicts import difference

CASES = {
    "2 numbers in each chunk": {"count": 2, "dtype": torch.float32},
    "3 integers in each chunk": {"count": 3, "dtype": torch.int64},
}
ONLY = ("send", "recv", "all_to_all")
INSTEAD = "use all_to_all_single, or isend and irecv"
EXACT = {"rtol": 0, "atol": 0}


def chunk_of(rank, count, dtype):
    """Return the chunk of a rank."""
    return 10**rank * torch.arange(1, count + 1).to(dtype)


def run(all_gather, count, dtype):
    """Call the learner's function on this rank."""
    return all_gather(chunk_of(dist.get_rank(), count, dtype))


def expected(rank, world_size, count, dtype):
    """Return what run() should return."""
    return torch.cat([chunk_of(other, count, dtype) for other in range(world_size)])


def limits(rank, world_size, count, dtype):
    """Return how much a rank may send."""
    chunks = world_size - 1
    # An all_to_all counts as one message, also if it has nothing to send.
    return {"messages": max(chunks, 1), "bytes": chunks * count * dtype.itemsize}


def explain(outcome):
    """Put typical mistakes into words."""
    size = outcome.world_size
    count = outcome.case.get("count")
    if outcome.verdict == "COSTLY":
        mine = outcome.messages[outcome.rank]
        if any(message.kind == "send" and message.numel > count for message in mine):
            return "A message carries more than one chunk. One chunk is enough for each message."
        return None
    if outcome.verdict == "HANG":
        return None
    actual, right = outcome.of_rank()
    if actual is None:
        return "Return the chunks as a new tensor."
    if not isinstance(actual, torch.Tensor) or actual.shape != right.shape:
        return None
    if actual.dtype != right.dtype:
        return "Use empty_like or new_empty to make a buffer with the dtype of the chunk."
    chunks = right.chunk(size)
    places = []
    for found in actual.chunk(size):
        same = [rank for rank in range(size) if not difference(found, chunks[rank], EXACT)]
        places.append(same[0] if same else None)
    if sorted(each for each in places if each is not None) == list(range(size)):
        return f"The chunks are in the order of ranks {', '.join(map(str, places))}."
    missing = [str(rank) for rank in range(size) if rank not in places]
    if missing:
        return f"The chunk of rank {missing[0]} is missing. Is wait() called for each request?"
    return None
