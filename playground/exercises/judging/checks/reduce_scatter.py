"""How reduce_scatter is checked."""

import torch
import torch.distributed as dist
from judging.single import digits_of
from judging.words import wrong_in_sum

CASES = {
    "2 numbers in each chunk": {"chunk": 2, "dtype": torch.float32},
    "1 number in each chunk": {"chunk": 1, "dtype": torch.float64},
    "3 integers in each chunk": {"chunk": 3, "dtype": torch.int64},
}
ONLY = ("send", "recv", "all_to_all")
INSTEAD = "use all_to_all_single, or isend and irecv"
HINTS = """
Rank r needs chunk r of every rank. Which collective sends chunk r of every rank to rank r? What is
left to do on rank r?

dist.all_to_all_single(output, input) sends chunk r of `input` to rank r. The chunk that came from
rank s is chunk s of `output`. output.view(n, -1) has one row for each rank.

received = a buffer like tensor
dist.all_to_all_single(received, tensor)
return the sum of the n chunks of `received`
"""


def tensor_of(rank, world_size, chunk, dtype):
    return digits_of(rank, (world_size * chunk,), dtype)


def run(reduce_scatter, rank, world_size, chunk, dtype):
    tensor = tensor_of(rank, world_size, chunk, dtype)
    returned = reduce_scatter(tensor)
    return {"the returned tensor": returned, "its own tensor": tensor}


def expected(rank, world_size, chunk, dtype):
    tensors = [tensor_of(other, world_size, chunk, dtype) for other in range(world_size)]
    mine = sum(tensors).chunk(world_size)[rank]
    return {"the returned tensor": mine, "its own tensor": tensors[rank]}


def limits(rank, world_size, chunk, dtype):
    chunks = world_size - 1
    return {"messages": chunks, "bytes": chunks * chunk * dtype.itemsize}


def reduce_scatter(tensor):
    """Why: all_to_all brings rank r chunk r of every rank, and rank r adds up these chunks."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    return received.view(dist.get_world_size(), -1).sum(0)


WORDS = {"bytes;": "A rank needs one chunk of each tensor, and not the whole tensors."}


def explain(trial):
    actual = trial.results[trial.rank]["the returned tensor"]
    n = trial.world_size
    tensors = [tensor_of(rank, n, **trial.case) for rank in range(n)]
    return wrong_in_sum(actual, [tensor.chunk(n)[trial.rank] for tensor in tensors])


MISTAKES = {
    "what is expected, divided by 2": (".sum(0)", ".double().mean(0).to(tensor.dtype)"),
    "is what rank 1 should have": ("received, tensor)", "received, tensor.roll(len(tensor) // 2))"),
    "its own tensor: [1, 2, 10": ("return received", "tensor.copy_(received); return received"),
    "Rank 0's numbers are missing at position 0.": (".sum(0)", "[1:].sum(0)"),
}
