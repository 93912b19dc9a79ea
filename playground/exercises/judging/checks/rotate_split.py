"""How rotate_split is checked."""

import torch
import torch.distributed as dist
from judging.texts import places_of

from common.language import rotate
from watching.facts import difference

CASES = {
    "6 tokens on each rank": {"each": 6},
    "another number of tokens, float64": {"each": 5, "more": 3, "dtype": torch.float64},
}
SIZE = 8
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
LIMITS = {"messages": 0}
HINTS = """
Which places in the sequence have this rank's tokens? Attention compares tokens of all ranks, so a
distance between two tokens must not depend on which ranks have them.

torch.cat joins the places of the two chunks. places[:, None] * speeds is a table: a row for each
token, and a column for each pair. heads.chunk(2, dim=-1) returns all x and all y.

places = those of chunk r and of chunk 2n - 1 - r
speeds = 10000 ** (-i / size) for i = 0, 2, 4, ... below size
a = places * speeds, a table of (tokens of this rank, size / 2)
return the new x and the new y, joined along the last dimension
"""


def whole(world_size, each, more=0, dtype=torch.float32):
    """Return queries of all tokens, and the places of each rank's tokens."""
    tokens = each * world_size + more
    generator = torch.Generator().manual_seed(tokens)
    heads = torch.randn(2, 3, tokens, SIZE, generator=generator).to(dtype)
    return heads, places_of("zigzag", tokens, world_size)


def run(rotate_split, rank, world_size, **case):
    heads, places = whole(world_size, **case)
    return rotate_split(heads[:, :, places[rank]], heads.shape[2])


def expected(rank, world_size, **case):
    heads, places = whole(world_size, **case)
    return rotate(heads, torch.arange(heads.shape[2]))[:, :, places[rank]]


def rotate_split(heads, tokens):
    """Why: the angle between two tokens tells how far apart they are, on whichever ranks."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    size = heads.shape[-1]
    chunks = torch.arange(tokens, device=heads.device).tensor_split(2 * n)
    places = torch.cat([chunks[rank], chunks[2 * n - 1 - rank]])
    pairs = torch.arange(0, size, 2, device=heads.device, dtype=heads.dtype)
    angles = places[:, None] * 10_000 ** (-pairs / size)
    cos = angles.cos()
    sin = angles.sin()
    x, y = heads.chunk(2, dim=-1)
    return torch.cat([x * cos - y * sin, x * sin + y * cos], dim=-1)


WORDS = {
    "COSTLY": "`tokens` and the rank tell the places, so nothing has to be sent.",
    "CRASH.*must match": "If 2n does not divide `tokens`, the chunks differ in size by one.",
}
COSTLY, SIZES = WORDS.values()
MISTAKES = {
    "The token at place 9 is rotated as if its place were 6.": (
        *("chunks[2 * n - 1 - rank]", "chunks[n + rank]"),
    ),
    "It differs only at [:, :, 1:].": ("-pairs / size)\n", "-pairs / size) * -1\n"),
    COSTLY: ("    size =", "    dist.all_gather_object([None] * n, rank)\n    size ="),
    SIZES: (
        *("torch.arange(tokens, device=heads.device)", "torch.arange(tokens // (2 * n) * 2 * n)"),
    ),
}


def explain(trial):
    actual, right = trial.of_rank()
    if not isinstance(actual, torch.Tensor) or actual.shape != right.shape:
        return None
    heads, places = whole(trial.world_size, **trial.case)
    tokens = range(actual.shape[2])
    first = next(i for i in tokens if difference(actual[:, :, i], right[:, :, i], TOLERANCE))
    place = places[trial.rank][first]
    for other in range(heads.shape[2]):
        rotated = rotate(heads[:, :, [place]], torch.tensor([other]))
        if not difference(actual[:, :, [first]], rotated, TOLERANCE):
            return f"The token at place {place} is rotated as if its place were {other}."
    return None
