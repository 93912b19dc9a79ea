"""How ring_all_reduce is checked."""

import torch
import torch.distributed as dist
from verdicts import Rung, contributions

CASES = {
    "60 numbers": {"shape": (60,), "dtype": torch.float32},
    "7 numbers": {"shape": (7,), "dtype": torch.float32},
    "3 x 4 numbers": {"shape": (3, 4), "dtype": torch.float64},
    "2 numbers": {"shape": (2,), "dtype": torch.float32},
}
RUNG_1 = Rung(
    cases=("60 numbers",),
    words="for a length that n divides",
    then="any length and shape, in messages of one chunk.",
)
ONLY = ("send", "recv")
INSTEAD = "use batch_isend_irecv"


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
