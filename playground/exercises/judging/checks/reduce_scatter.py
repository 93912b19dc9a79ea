"""How reduce_scatter is checked."""

import torch
import torch.distributed as dist
from judging.words import contributions, difference

CASES = {
    "2 numbers in each chunk": {"chunk": 2, "dtype": torch.float32},
    "1 number in each chunk": {"chunk": 1, "dtype": torch.float64},
    "3 integers in each chunk": {"chunk": 3, "dtype": torch.int64},
}
ONLY = ("send", "recv", "all_to_all")
INSTEAD = "use all_to_all_single, or isend and irecv"
EXACT = {"rtol": 0, "atol": 0}
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
    """Return the tensor of a rank. Its digits tell which ranks a sum contains."""
    return 10**rank * torch.arange(1, world_size * chunk + 1).to(dtype)


def run(reduce_scatter, chunk, dtype):
    """Call the learner's function on this rank."""
    tensor = tensor_of(dist.get_rank(), dist.get_world_size(), chunk, dtype)
    returned = reduce_scatter(tensor)
    return {"the returned tensor": returned, "its own tensor": tensor}


def total(world_size, chunk, dtype):
    """Return the sum over all ranks."""
    return sum(tensor_of(other, world_size, chunk, dtype) for other in range(world_size))


def expected(rank, world_size, chunk, dtype):
    """Return what run() should return."""
    mine = total(world_size, chunk, dtype).chunk(world_size)[rank]
    own = tensor_of(rank, world_size, chunk, dtype)
    return {"the returned tensor": mine, "its own tensor": own}


def limits(rank, world_size, chunk, dtype):
    """Return how much a rank may send."""
    chunks = world_size - 1
    # An all_to_all counts as one message, also if it has nothing to send.
    return {"messages": max(chunks, 1), "bytes": chunks * chunk * dtype.itemsize}


def reduce_scatter(tensor):
    """Why: all_to_all brings rank r chunk r of every rank, and rank r adds up these chunks."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor)
    return received.view(dist.get_world_size(), -1).sum(0)


def explain(trial):
    """Put typical mistakes into words."""
    size = trial.world_size
    if trial.verdict == "COSTLY":
        mine = trial.messages[trial.rank]
        if any(message.numel == size * trial.case["chunk"] for message in mine):
            return "Each rank sends its whole tensor. A rank needs one chunk of it."
        return None
    if trial.verdict == "HANG":
        return None
    actual, right = trial.of_rank()
    returned = actual["the returned tensor"]
    if returned is None:
        return "Return the chunk as a new tensor."
    if difference(actual["its own tensor"], right["its own tensor"], EXACT):
        return "The tensor of the caller has changed. Add up in a separate tensor."
    if not isinstance(returned, torch.Tensor):
        return None
    whole = total(size, **trial.case)
    if not difference(returned, whole, EXACT):
        return "This is the whole sum. Return this rank's chunk of it."
    for rank, chunk in enumerate(whole.chunk(size)):
        if not difference(returned, chunk, EXACT):
            return f"This is chunk {rank} of the sum, which is rank {rank}'s."
    if returned.shape != right["the returned tensor"].shape:
        return None
    first = trial.rank * trial.case["chunk"]
    parts = [tensor_of(rank, size, **trial.case)[first].item() for rank in range(size)]
    counts = contributions(returned[0].item(), parts)
    if counts is not None and 0 in counts:
        return f"Rank {counts.index(0)}'s numbers are missing."
    if counts is not None and max(counts) > 1:
        return f"Rank {counts.index(max(counts))}'s numbers were added twice."
    return None


MISTAKES = {
    "divided by 2: averaged, but not added up?": (
        *(".sum(0)", ".sum(0).div(dist.get_world_size()).to(tensor.dtype)"),
    ),
    "This is chunk 1 of the sum, which is rank 1's.": (
        *("(received, tensor)", "(received, tensor.roll(-len(tensor) // dist.get_world_size()))"),
    ),
    "The tensor of the caller has changed. Add up in a separate tensor.": (
        *("return received", "tensor.copy_(received); return received"),
    ),
    "Rank 0's numbers are missing.": (
        *(".sum(0)", ".sum(0) - tensor.chunk(dist.get_world_size())[dist.get_rank()]"),
    ),
}
