"""How ring_all_reduce is checked."""

import torch
import torch.distributed as dist
from verdicts import contributions

CASES = {
    "7 numbers": {"shape": (7,), "dtype": torch.float32},
    "3 x 4 numbers": {"shape": (3, 4), "dtype": torch.float64},
    "2 numbers": {"shape": (2,), "dtype": torch.float32},
}
ONLY = ("send", "recv")
INSTEAD = "use batch_isend_irecv"
LESSON = ("nonblocking_p2p.py", "ring_all_reduce")
HINTS = (
    "Split the tensor into one chunk for each rank. First let each chunk travel around the ring "
    "and collect the numbers of all ranks. Then let the finished sums travel around the ring.",
    "tensor.view(-1).tensor_split(n) returns n views, some of which may be empty. "
    "dist.batch_isend_irecv([dist.P2POp(dist.isend, chunk, right), dist.P2POp(dist.irecv, buffer, "
    "left)]) starts both messages and returns requests. Call wait() for each of them.",
    "for step in range(n - 1): send chunk (rank - step) % n to the right, receive chunk "
    "(rank - step - 1) % n from the left, and add it.\n"
    "for step in range(n - 1): send chunk (rank - step + 1) % n, receive chunk (rank - step) % n, "
    "and keep it.",
)


def tensor_of(rank, shape, dtype):
    """Return the tensor of a rank. Its digits tell which ranks a sum contains."""
    count = torch.Size(shape).numel()
    return (10**rank * torch.arange(1, count + 1, dtype=dtype)).view(shape)


def run(ring_all_reduce, shape, dtype):
    """Call the learner's function on this rank. Returns what its tensor then is."""
    tensor = tensor_of(dist.get_rank(), shape, dtype)
    ring_all_reduce(tensor)
    return tensor


def expected(rank, world_size, shape, dtype):
    """Return what the tensor of a rank should be."""
    return sum(tensor_of(other, shape, dtype) for other in range(world_size))


def limits(rank, world_size, shape, dtype):
    """Return how much a rank may send."""
    numbers = -(-torch.Size(shape).numel() // world_size)  # in the largest chunk
    messages = 2 * (world_size - 1)
    return {"messages": messages, "bytes": messages * numbers * dtype.itemsize}


def explain(outcome):
    """Put typical mistakes into words."""
    size = outcome.world_size
    mine = outcome.messages[outcome.rank]
    sent = [message for message in mine if message.kind == "send"]
    if outcome.verdict == "COSTLY":
        whole = outcome.expected[0].numel()
        if all(message.numel == whole for message in sent):
            return "Each message is the whole tensor. Send one chunk of it, of 1/n of the numbers."
        return None
    if outcome.verdict == "HANG":
        return None
    actual, _ = outcome.of_rank()
    if actual is None or actual.shape != outcome.expected[0].shape:
        return None
    parts = [tensor_of(rank, **outcome.case).flatten() for rank in range(size)]
    for position, number in enumerate(actual.flatten().tolist()):
        counts = contributions(number, [part[position].item() for part in parts])
        if counts is None or min(counts) == max(counts) == 1:
            continue
        missing = [rank for rank, count in enumerate(counts) if count == 0]
        if missing and len(sent) < 2 * (size - 1):
            steps = f"2(n - 1) = {2 * (size - 1)} steps, not {len(sent)}?"
            return f"rank {missing[0]}'s chunk never arrived at position {position}: {steps}"
        if missing:
            why = "Is each chunk sent in the right step, and is wait() called for each request?"
            return f"rank {missing[0]}'s numbers are missing at position {position}. {why}"
        if max(counts) > 1 and min(counts) == 1:
            twice = counts.index(max(counts))
            return f"rank {twice}'s numbers were added twice at position {position}"
    return None
