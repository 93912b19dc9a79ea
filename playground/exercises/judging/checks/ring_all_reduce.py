"""How ring_all_reduce is checked."""

import itertools
import math

import torch
import torch.distributed as dist
from judging.single import digits_of

CASES = {
    "60 numbers": {"shape": (60,), "dtype": torch.float32},
    "7 numbers": {"shape": (7,), "dtype": torch.float32},
    "3 x 4 numbers": {"shape": (3, 4), "dtype": torch.float64},
    "2 numbers": {"shape": (2,), "dtype": torch.float32},
}
RUNG_1 = "for a length that n divides"
RUNG_2 = "any length and shape, in messages of one chunk."
ONLY = ("send", "recv")
INSTEAD = "use batch_isend_irecv"
STARTS = True
HINTS = """
Split the tensor into one chunk for each rank. First let each chunk travel around the ring and
collect the numbers of all ranks. Then let the finished sums travel around the ring.

tensor.view(-1).tensor_split(n) returns n views, some of which may be empty.
dist.batch_isend_irecv([dist.P2POp(dist.irecv, buffer, left), dist.P2POp(dist.isend, chunk, right)])
starts both messages and returns requests. Call wait() for each of them.

for step in range(n - 1): send chunk (rank - step) % n to the right, receive chunk (rank - step - 1)
    % n from the left, and add it.
for step in range(n - 1): send chunk (rank - step + 1) % n, receive chunk (rank - step) % n, and
    keep it.
"""


def run(ring_all_reduce, rank, world_size, shape, dtype):
    tensor = digits_of(rank, shape, dtype)
    ring_all_reduce(tensor)
    return tensor


def expected(rank, world_size, shape, dtype):
    return sum(digits_of(other, shape, dtype) for other in range(world_size))


def limits(rank, world_size, shape, dtype):
    numbers = -(-torch.Size(shape).numel() // world_size)  # in the largest chunk
    messages = 2 * (world_size - 1)
    return {"messages": messages, "bytes": messages * numbers * dtype.itemsize}


def ring_all_reduce(tensor):
    """Why: each rank sends 2(n-1) chunks of 1/n of the tensor, so all links work in every step."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    right = (rank + 1) % n
    left = (rank - 1) % n

    def exchange(chunk, received):
        # With NCCL, the messages of two ranks share one communicator and run in order, so both
        # ranks could wait for ever if both send first. A batch starts its operations together.
        operations = [dist.P2POp(dist.irecv, received, left), dist.P2POp(dist.isend, chunk, right)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()

    chunks = tensor.view(-1).tensor_split(n)
    for step in range(n - 1):  # reduce-scatter
        keep = chunks[(rank - step - 1) % n]
        received = torch.empty_like(keep)
        exchange(chunks[(rank - step) % n], received)
        keep.add_(received)
    for step in range(n - 1):  # all-gather
        exchange(chunks[(rank - step + 1) % n], chunks[(rank - step) % n])


WORDS = {"bytes;": "A message is one chunk of the tensor, 1/n of the numbers."}


def explain(verdict):
    """Return whose numbers are missing in the sum, or are there twice, at the first wrong one.

    With those of digits_of(), there is one way at most.
    """
    actual, tensors = verdict.found[verdict.rank], list(verdict.start.values())
    if getattr(actual, "shape", None) != tensors[0].shape:
        return None
    columns = torch.stack([actual, *tensors]).flatten(1).t().tolist()
    wrong = (place for place, (number, *parts) in enumerate(columns) if number != sum(parts))
    position = next(wrong, 0)
    number, *parts = columns[position]
    for counts in itertools.product(range(3), repeat=len(parts)):
        total = sum(count * part for count, part in zip(counts, parts, strict=True))
        if math.isclose(total, number, rel_tol=1e-6) and len(set(counts)) > 1:
            rank = next(rank for rank, count in enumerate(counts) if count != 1)
            does = "added twice" if counts[rank] else "missing"
            return f"Rank {rank}'s numbers are {does} at position {position}."
    return None


MISTAKES = {
    "Rank 1's numbers are missing at position 0.": ("keep.add_", "keep.copy_"),
    "Rank 0's numbers are added twice at position 0.": (
        *("keep.add_(received)", "keep.add_(2 * received)"),
    ),
    "CRASH with 3 ranks, 2 numbers": ("tensor_split", "chunk"),
}
