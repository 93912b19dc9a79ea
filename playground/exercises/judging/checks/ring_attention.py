"""How ring_attention is checked."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from verdicts import difference

ONLY = ("send", "recv")
INSTEAD = "send keys and values around a ring, with batch_isend_irecv"
CASES = {
    "tokens in zigzag": {"order": "zigzag", "each": 4},
    "tokens in their order, 2 images, 3 heads": {"order": "plain", "each": 3, "heads": 3},
    "ranks with different numbers of tokens": {"order": "plain", "each": 3, "more": 1},
    "large scores": {"order": "dealt", "each": 2, "scale": 3000.0},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


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


def whole(world_size, order, each, heads=1, more=0, scale=1.0):
    """Return the query, key and value of all tokens, and the places."""
    tokens = each * world_size + more
    generator = torch.Generator().manual_seed(tokens)
    images = 2 if heads > 1 else 1
    found = []
    for _ in range(3):
        found.append(torch.randn(images, heads, tokens, 2, generator=generator))
    found[0] *= scale
    return found, places_of(order, tokens, world_size)


def run(ring_attention, **case):
    """Call the learner's function on this rank."""
    tensors, places = whole(dist.get_world_size(), **case)
    mine = places[dist.get_rank()]
    return ring_attention(*[tensor[:, :, mine] for tensor in tensors], places)


def expected(rank, world_size, **case):
    """Return what run() should return."""
    (query, key, value), places = whole(world_size, **case)
    read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return read[:, :, places[rank]]


def limits(rank, world_size, **case):
    """Return how much a rank may send: all keys and values but those of one neighbour.

    Which one depends on the direction of the ring, and the smaller one counts.
    """
    if world_size == 1:
        return {}
    (_, key, value), places = whole(world_size, **case)
    bytes_of_token = (key.nbytes + value.nbytes) // key.shape[2]
    neighbours = [places[(rank + step) % world_size] for step in (1, -1)]
    tokens = key.shape[2] - min(map(len, neighbours))
    return {"messages": 2 * (world_size - 1), "bytes": tokens * bytes_of_token}


def with_mask(outcome, seen, scaled=True):
    """Return what a rank has if its tokens read from the tokens that are seen.

    Args:
        outcome: of the case.
        seen: a function of the places of the queries, (T, 1), and those of the keys, (T,).
        scaled: whether scores are divided by the square root of the size.
    """
    (query, key, value), places = whole(outcome.world_size, **outcome.case)
    mine = places[outcome.rank]
    mask = seen(mine[:, None], torch.arange(key.shape[2]), places)
    scale = None if scaled else 1.0
    query = query[:, :, mine]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def of_rank(outcome, places):
    """Return a function that says which tokens this rank has."""
    return torch.isin(torch.arange(sum(map(len, places))), places[outcome.rank])


def explain(outcome):
    """Put typical mistakes into words."""
    if outcome.verdict == "COSTLY":
        return "After n - 1 steps, each rank has had the keys of all others. The last may stay."
    if outcome.verdict != "WRONG":
        return None
    actual, right = outcome.of_rank()
    if not isinstance(actual, torch.Tensor) or actual.shape != right.shape:
        return None
    if not actual.isfinite().all():
        if outcome.case.get("scale"):
            return "exp() of a large score overflows. Subtract the largest score so far first."
        return (
            "Where a whole block comes later than a token, its largest score is -inf. Is that "
            "subtracted from -inf, or is a sum of no weights divided by 0?"
        )
    guesses = {
        "Here each token reads from all tokens, and not only from itself and the earlier ones.": (
            lambda query, key, places: (key >= 0) & (query >= 0),
            True,
        ),
        "Here each token reads from the tokens of its own rank only.": (
            lambda query, key, places: (key <= query) & of_rank(outcome, places),
            True,
        ),
        "Here no token reads from itself.": (lambda query, key, places: key < query, True),
        "The scores are not divided by the square root of the size.": (
            lambda query, key, places: key <= query,
            False,
        ),
    }
    for words, (seen, scaled) in guesses.items():
        if not difference(actual, with_mask(outcome, seen, scaled), TOLERANCE):
            return words
    if not difference(actual, mean_of_blocks(outcome), TOLERANCE):
        return (
            "This is the mean of the blocks' means. A block counts as much as its weights add up "
            "to, so divide once, at the end."
        )
    if not difference(actual, without_shrinking(outcome), TOLERANCE):
        return (
            "When a block has a larger score, what was added up before must shrink by "
            "exp(the maximum before - the larger one)."
        )
    return None


def blocks(outcome):
    """Return the scores and values of each block, in the order in which they arrive."""
    (query, key, value), places = whole(outcome.world_size, **outcome.case)
    mine = places[outcome.rank]
    found = []
    for step in range(outcome.world_size):
        theirs = places[(outcome.rank - step) % outcome.world_size]
        scores = query[:, :, mine] @ key[:, :, theirs].mT / query.shape[-1] ** 0.5
        scores = scores.masked_fill(theirs > mine[:, None], -torch.inf)
        found.append((scores, value[:, :, theirs]))
    return found


def mean_of_blocks(outcome):
    """Return the mean over the blocks of what a token reads in each, where it reads anything."""
    total = 0
    count = 0
    for scores, values in blocks(outcome):
        total = total + scores.softmax(dim=-1).nan_to_num() @ values
        count = count + scores.isfinite().any(dim=-1, keepdim=True).float()
    return total / count


def without_shrinking(outcome):
    """Return what comes of it if the maximum is subtracted, but earlier sums do not shrink."""
    maximum = -torch.inf
    total = 0
    read = 0
    for scores, values in blocks(outcome):
        maximum = scores.amax(dim=-1, keepdim=True).clamp(min=maximum)
        weights = (scores - maximum).exp()
        total = total + weights.sum(dim=-1, keepdim=True)
        read = read + weights @ values
    return read / total


def explain_crash(crash):
    """Put typical errors into words."""
    if "its buffer has" in crash.error or "must match the size of tensor" in crash.error:
        return "Ranks may have different numbers of tokens. places tells how many will arrive."
    return None
