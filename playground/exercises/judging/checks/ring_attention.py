"""How ring_attention is checked."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

ONLY = ("send", "recv")
INSTEAD = "send keys and values around a ring, with batch_isend_irecv"
CASES = {
    "tokens in zigzag": {"order": "zigzag", "each": 4},
    "tokens in their order": {"order": "plain", "each": 3},
    "ranks with different numbers of tokens": {"order": "plain", "each": 3, "more": 1},
    "large scores": {"order": "dealt", "each": 2, "scale": 3000.0},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
HELPERS = ("pass_on",)
HINTS = """
In the first step, a rank has its own keys and values. In each further step, it has those of the
rank before. Which two sums over the blocks give the mean at the end, and what happens to them when
a block has a larger score than all blocks before it?

torch.stack([key, value]) travels as one tensor. dist.batch_isend_irecv sends and receives at the
same time. places[source] > places[rank][:, None] is True where a key is later than a query, and
masked_fill puts -inf there. torch.maximum(maximum, scores.amax(-1, keepdim=True)) is the new one.

maximum = -inf, total = 0, read = 0
for each step: source = the rank whose keys are here: (rank - step) % n
               scores = query @ keys.mT / sqrt(size), -inf where the key is later
               larger = the maximum so far, with this block
               weights = exp(scores - larger), shrink = exp(maximum - larger)
               total = total * shrink + sum of weights; read = read * shrink + weights @ values
               unless it is the last step: send keys and values to rank + 1
return read / total
"""


def places_of(order, tokens, world_size):
    """Return for each rank the places of its tokens, in ascending order."""
    everything = torch.arange(tokens)
    if order == "plain":
        return list(everything.tensor_split(world_size))
    if order == "dealt":
        return [everything[rank::world_size] for rank in range(world_size)]
    chunks = everything.tensor_split(2 * world_size)
    pairs = zip(chunks[:world_size], chunks[: world_size - 1 : -1], strict=True)
    return [torch.cat(pair) for pair in pairs]


def whole(world_size, order, each, more=0, scale=1.0):
    tokens = each * world_size + more
    generator = torch.Generator().manual_seed(tokens)
    query, key, value = torch.randn(3, 2, 3, tokens, 2, generator=generator)  # 2 images, 3 heads
    return (scale * query, key, value), places_of(order, tokens, world_size)


def run(ring_attention, rank, world_size, **case):
    tensors, places = whole(world_size, **case)
    mine = places[rank]
    return ring_attention(*[tensor[:, :, mine] for tensor in tensors], places)


def expected(rank, world_size, **case):
    (query, key, value), places = whole(world_size, **case)
    read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return read[:, :, places[rank]]


def limits(rank, world_size, **case):
    """Return how much a rank may send: all keys and values but those of one neighbour.

    Which one depends on the direction of the ring, and the smaller one counts.
    """
    (_, key, value), places = whole(world_size, **case)
    bytes_of_token = (key.nbytes + value.nbytes) // key.shape[2]
    neighbours = [places[(rank + step) % world_size] for step in (1, -1)]
    tokens = key.shape[2] - min(map(len, neighbours))
    return {"messages": 2 * (world_size - 1), "bytes": tokens * bytes_of_token}


def ring_attention(query, key, value, places):
    """Why: sums over blocks can be added up, if they shrink whenever the maximum becomes larger."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    maximum = torch.full_like(query[..., :1], -torch.inf)
    total = torch.zeros_like(maximum)
    read = torch.zeros_like(query)
    travelling = torch.stack([key, value])
    for step in range(n):
        keys, values = travelling
        later = places[(rank - step) % n] > places[rank][:, None]
        scores = query @ keys.mT / query.shape[-1] ** 0.5
        scores = scores.masked_fill(later.to(query.device), -torch.inf)
        # The first block has each token itself, so from then on no maximum is -inf.
        larger = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        weights = (scores - larger).exp()
        shrink = (maximum - larger).exp()
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        read = read * shrink + weights @ values
        maximum = larger
        if step < n - 1:
            travelling = pass_on(travelling, len(places[(rank - step - 1) % n]))
    return read / total


def pass_on(tensor, tokens):
    """Send a tensor to the right, and return what arrives from the left, with so many tokens."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    received = tensor.new_empty(*tensor.shape[:-2], tokens, tensor.shape[-1])
    left = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    right = dist.P2POp(dist.isend, tensor, (rank + 1) % n)
    for request in dist.batch_isend_irecv([left, right]):
        request.wait()
    return received


SIZES = "CRASH.*(its buffer has|must match the size of tensor)"
OVERFLOW = r"WRONG, large scores.*has \[[^]]*(nan|inf)"
NOTHING = r"WRONG.*has \[[^]]*(nan|inf)"
MAXIMUM = "torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))"
WORDS = {
    SIZES: "Ranks may have different numbers of tokens. places tells how many will arrive.",
    "COSTLY": "After n - 1 steps, each rank has had the keys of all others. The last may stay.",
    OVERFLOW: "exp() of a large score overflows. Subtract the largest score so far first.",
    NOTHING: "Where a token may read nothing in a block, its largest score is -inf, and "
    "-inf - -inf is nan.",
}
MISTAKES = {
    WORDS[SIZES]: ("len(places[(rank - step - 1) % n])", "len(places[rank])"),
    WORDS["COSTLY"]: ("if step < n - 1:", "if n > 1:"),
    WORDS[OVERFLOW]: (MAXIMUM, "0", "(maximum - larger).exp()", "1"),
    WORDS[NOTHING]: (MAXIMUM, "scores.amax(-1, True)"),
    "It differs only at [:, :, :3].": ("> places[rank]", "< 0 * places[rank]"),
    "It differs only at [:, :, 1:].": (" / query.shape[-1] ** 0.5", ""),
}
