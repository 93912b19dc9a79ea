"""How tree_broadcast is checked."""

import torch
import torch.distributed as dist
from traffic import steps
from verdicts import difference

CASES = {
    "4 numbers": {"shape": (4,), "dtype": torch.float32},
    "2 x 3 integers": {"shape": (2, 3), "dtype": torch.int64},
}
WORLD_SIZES = (1, 2, 3, 4, 5, 8)  # from 7 ranks on, some trees with two branches are too slow
ONLY = ("send", "recv")
INSTEAD = "use send and recv"
EVEN_ONLY = "right for powers of two only"
EXACT = {"rtol": 0, "atol": 0}


def tensor_of(rank, shape, dtype):
    """Return the tensor of a rank."""
    count = torch.Size(shape).numel()
    return (10**rank * torch.arange(1, count + 1)).to(dtype).view(shape)


def run(tree_broadcast, shape, dtype):
    """Call the learner's function on this rank. Returns what its tensor then is."""
    tensor = tensor_of(dist.get_rank(), shape, dtype)
    tree_broadcast(tensor)
    return tensor


def expected(rank, world_size, shape, dtype):
    """Return what the tensor of a rank should be."""
    return tensor_of(0, shape, dtype)


def limits(rank, world_size, shape, dtype):
    """Return how many rounds are enough, and how much a rank may send in them."""
    rounds = (world_size - 1).bit_length()  # ceil(log2 n)
    nbytes = rounds * tensor_of(rank, shape, dtype).nbytes
    return {"rounds": rounds, "messages": rounds, "bytes": nbytes}


def explain(outcome):
    """Put typical mistakes into words."""
    sent, _ = steps(outcome.messages)
    senders = {each.sender for each in sent}
    if outcome.verdict == "COSTLY":
        if senders == {0}:
            return "Only rank 0 sends. The ranks that have the tensor already could help."
        each_once = all(len(mine) <= 2 for mine in outcome.messages)
        if each_once and len(sent) == outcome.world_size - 1:
            return "Each rank sends once only. It could send again in the next round."
        last = sent[-1]
        return (
            f"Rank {last.sender} sends to rank {last.receiver} in round {last.step}. Which rank "
            "has the tensor, and could send in an earlier round?"
        )
    if outcome.verdict == "HANG":
        return None
    actual, _ = outcome.of_rank()
    own = tensor_of(outcome.rank, **outcome.case)
    received = [each for each in sent if each.receiver == outcome.rank]
    if outcome.rank == 0:
        return "Rank 0 should keep its own tensor."
    if not difference(actual, own, EXACT) and not received:
        return f"No message has reached rank {outcome.rank}. Is the number of rounds rounded up?"
    for rank in range(1, outcome.world_size):
        if not difference(actual, tensor_of(rank, **outcome.case), EXACT):
            return f"This is rank {rank}'s tensor. Has rank {rank} sent before it received?"
    return None
