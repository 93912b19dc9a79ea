"""How redistribute is checked."""

import torch
import torch.distributed as dist
from judging.single import digits_of
from judging.words import wrong_in_sum

OF_RUNG_1 = ["R to S0", "S0 to R", "P to S0", "P to R"]
MORE = ["R to S1", "S1 to R", "P to S1", "S0 to S1", "S1 to S0", "S1 to S1"]
CASES = {}
for move in OF_RUNG_1 + MORE:
    old, new = move.split(" to ")
    CASES[move] = {"old": old, "new": new}
CASES_OF_RUNG_1 = len(OF_RUNG_1)
RUNG_1 = "for R, S0 and P"
RUNG_2 = "S1, and no more bytes than are needed."
HINTS = """
Which of these numbers does this rank have already, and which rank has the others? Of P, every rank
has a term of every number. From S0 to S1, a rank keeps some of its columns and sends the others.

all_gather for shards that become R, reduce_scatter and all_reduce for P, all_to_all_single from S0
to S1 and back. tensor.chunk(n, dim) cuts along a dimension, torch.cat(chunks, dim) joins, and
torch.stack(chunks) is contiguous, with chunk r at index r.

R to S:  chunk r of local along the new dimension
S to R:  all_gather, and join along the old dimension
P to R:  all_reduce of a copy
P to S:  chunks along the new dimension, reduce_scatter
S to S:  chunks along the new dimension, stacked; all_to_all_single; join along the old dimension
"""


def part_of(whole, placement, rank, world_size):
    """Return what a rank has of a matrix."""
    if placement == "R":
        return whole.clone()
    return whole.chunk(world_size, int(placement[1]))[rank].clone()


def terms_of(old, world_size):
    """Return matrices of which the sum is placed: those of P, or a single one."""
    shape = (2 * world_size, 3 * world_size)
    return [digits_of(rank, shape) for rank in range(world_size if old == "P" else 1)]


def local_of(old, rank, world_size):
    """Return what a rank has before the move."""
    terms = terms_of(old, world_size)
    return terms[rank] if old == "P" else part_of(terms[0], old, rank, world_size)


def run(redistribute, rank, world_size, old, new):
    local = local_of(old, rank, world_size)
    returned = redistribute(local, old, new)
    return {"the returned part": returned, "its own part": local}


def expected(rank, world_size, old, new):
    whole = sum(terms_of(old, world_size))
    mine = part_of(whole, new, rank, world_size)
    return {"the returned part": mine, "its own part": local_of(old, rank, world_size)}


def limits(rank, world_size, old, new):
    if old in ("R", new):
        return {"messages": 0}
    nbytes = terms_of(old, world_size)[0].nbytes // world_size  # of a shard
    if (old, new) == ("P", "R"):
        nbytes *= 2
    elif old != "P" and new != "R":
        nbytes //= world_size
    return {"bytes": (world_size - 1) * nbytes}  # to each other rank: a shard, two, or a part of it


def redistribute(local, old, new):
    """Why: a rank gets the numbers that it lacks, and P is added up on the way."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    if old == new:
        return local
    if old == "R":
        return local.chunk(n, int(new[1]))[rank]
    if old == "P" and new == "R":
        total = local.clone()
        dist.all_reduce(total)
        return total
    if old == "P":
        chunks = [chunk.contiguous() for chunk in local.chunk(n, int(new[1]))]
        shard = torch.empty_like(chunks[0])
        dist.reduce_scatter(shard, chunks)
        return shard
    if new == "R":
        shards = [torch.empty_like(local) for _ in range(n)]
        dist.all_gather(shards, local)
        return torch.cat(shards, int(old[1]))
    chunks = torch.stack(local.chunk(n, int(new[1])))
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks)
    return torch.cat(list(received), int(old[1]))


WORDS = {
    "COSTLY, R to|COSTLY, S1 to S1": "This rank has all that it needs, so nothing has to be sent.",
    "COSTLY, P to S": "A rank needs the sums of its own shard only.",
    "COSTLY, S. to S": "Each rank needs only a block of another rank's shard.",
}
NOTHING, SUMS, BLOCK = WORDS.values()
JOINED = "The shards are joined along the other dimension."


def explain(trial):
    actual = trial.results[trial.rank]["the returned part"]
    right = trial.expected[trial.rank]["the returned part"]
    n = trial.world_size
    old, new = trial.case.values()
    if old == "P":
        terms = terms_of(old, n)
        return wrong_in_sum(actual, [part_of(term, new, trial.rank, n) for term in terms])
    if old != "R" and new == "R" and isinstance(actual, torch.Tensor):
        other = torch.cat(right.chunk(n, int(old[1])), 1 - int(old[1]))
        return JOINED if other.equal(actual) else None
    return None


IF_R = 'if old == "R":'
SCATTERS = """for source in range(n):
        dist.scatter(received[source], chunks if source == rank else None, src=source)"""
MISTAKES = {
    NOTHING: (IF_R, f"{IF_R}\n        dist.broadcast(local, 0)"),
    SUMS: (
        *("dist.reduce_scatter(shard, chunks)", "total = redistribute(local, old, 'R')"),
        *("return shard", "return redistribute(total, 'R', new)"),
    ),
    BLOCK: (
        *("dist.all_to_all_single(received, chunks)", "whole = redistribute(local, old, 'R')"),
        *("return torch.cat(list(received), int(old[1]))", "return redistribute(whole, 'R', new)"),
    ),
    JOINED: ("torch.cat(shards, int(old[1]))", "torch.cat(shards)"),
    "Only `its own part` is wrong.": ("local.clone()", "local"),
    "is not contiguous, and gloo sends its memory as it lies": (
        *("torch.stack(local.chunk(n, int(new[1])))", "list(local.chunk(n, int(new[1])))"),
        *("torch.empty_like(chunks)", "[torch.zeros(chunks[0].shape).double() for _ in chunks]"),
        *("dist.all_to_all_single(received, chunks)", SCATTERS),
    ),
    "Rank 1's numbers are missing": ("dist.all_reduce(total)", "dist.broadcast(total, 0)"),
}
