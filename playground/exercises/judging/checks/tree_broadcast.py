"""How tree_broadcast is checked."""

import torch
import torch.distributed as dist
from judging.single import digits_of

CASES = {
    "4 numbers": {"shape": (4,), "dtype": torch.float32},
    "2 x 3 integers": {"shape": (2, 3), "dtype": torch.int64},
}
WORLD_SIZES = (1, 2, 3, 4, 5, 8)  # from 7 ranks on, some trees with two branches are too slow
ONLY = ("send", "recv")
INSTEAD = "use send and recv"
STARTS = True
HINTS = """
After the first round, ranks 0 and 1 have the tensor. In the second round, both of them send. Which
ranks should they send to, so that after the round ranks 0 to 3 have it?

dist.send(tensor, dst) and dist.recv(tensor, src). Before a round, let `have` be the number of ranks
that have the tensor. It is 1, then 2, then 4, ...

have = 1
while have < n:
    a rank below have sends to rank + have, if there is such a rank
    a rank from have to 2 * have - 1 receives from rank - have
    have is doubled
"""


def run(tree_broadcast, rank, world_size, shape, dtype):
    tensor = digits_of(rank, shape, dtype)
    tree_broadcast(tensor)
    return tensor


def expected(rank, world_size, shape, dtype):
    return digits_of(0, shape, dtype)


def limits(rank, world_size, shape, dtype):
    rounds = (world_size - 1).bit_length()  # ceil(log2 n)
    nbytes = rounds * digits_of(rank, shape, dtype).nbytes
    return {"rounds": rounds, "messages": rounds, "bytes": nbytes}


def tree_broadcast(tensor):
    """Why: each round doubles the ranks that have the tensor, so ceil(log2 n) rounds are enough."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    have = 1  # ranks 0 to have - 1 have the tensor
    while have < n:
        if rank < have and rank + have < n:
            dist.send(tensor, rank + have)
        elif have <= rank < 2 * have:
            dist.recv(tensor, rank - have)
        have *= 2


WORDS = {
    "COSTLY": "Each rank that has the tensor can send in every round. `--trace` shows the rounds."
}
MISTAKES = {
    WORDS["COSTLY"]: (
        *("rank < have and rank + have < n", "rank == 0"),
        *("rank + have)", "have)"),
        *("have <= rank < 2 * have", "rank == have"),
        *("rank - have", "0"),
        *("have *= 2", "have += 1"),
    ),
    "rank 2 has [100, 200": ("while have < n:", "while 2 * have <= n:"),
    "there is no rank 3: the last one is 2": ("rank < have and rank + have < n", "rank < have"),
}
