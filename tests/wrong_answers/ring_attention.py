"""Wrong answers to ring_attention. Each docstring begins with words of the verdict it must get."""

import torch
import torch.distributed as dist


def _pass_on(tensor, tokens):
    """Send a tensor to the right, and return what arrives from the left, with so many tokens."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    received = tensor.new_empty(*tensor.shape[:-2], tokens, tensor.shape[-1])
    right = dist.P2POp(dist.isend, tensor, (rank + 1) % n)
    left = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for request in dist.batch_isend_irecv([right, left]):
        request.wait()
    return received


def _blocks(key, value, places, passes=None):
    """Return (places, keys, values) of each block, in the order in which they arrive."""
    rank = dist.get_rank()
    n = dist.get_world_size()
    passes = n - 1 if passes is None else passes
    travelling = torch.stack([key, value])
    found = []
    for step in range(n):
        found.append((places[(rank - step) % n], *travelling))
        if step < passes and n > 1:
            travelling = _pass_on(travelling, len(places[(rank - step - 1) % n]))
    return found


def _scores(query, keys, later):
    """Return the scores, -inf where a key is later."""
    scores = query @ keys.mT / query.shape[-1] ** 0.5
    return scores.masked_fill(later, -torch.inf)


def _attend(query, found, mine, hidden, shrinks=True):
    """Add up the blocks with a running maximum."""
    maximum = torch.full_like(query[..., :1], -torch.inf)
    total = torch.zeros_like(maximum)
    read = torch.zeros_like(query)
    for theirs, keys, values in found:
        scores = _scores(query, keys, hidden(theirs, mine[:, None]))
        larger = torch.maximum(maximum, scores.amax(dim=-1, keepdim=True))
        weights = (scores - larger).exp()
        shrink = (maximum - larger).exp() if shrinks else 1
        total = total * shrink + weights.sum(dim=-1, keepdim=True)
        read = read * shrink + weights @ values
        maximum = larger
    return read / total


def not_causal(query, key, value, places):
    """WRONG with 1 rank, tokens in zigzag ... Here each token reads from all tokens"""
    mine = places[dist.get_rank()]
    found = _blocks(key, value, places)
    return _attend(query, found, mine, lambda theirs, own: theirs < 0)


def own_tokens(query, key, value, places):
    """WRONG with 2 ranks, tokens in zigzag ... from the tokens of its own rank only."""
    mine = places[dist.get_rank()]
    found = [(mine, key, value)]
    return _attend(query, found, mine, lambda theirs, own: theirs > own)


def no_scale(query, key, value, places):
    """WRONG with 1 rank ... not divided by the square root of the size."""
    query = query * query.shape[-1] ** 0.5
    mine = places[dist.get_rank()]
    found = _blocks(key, value, places)
    return _attend(query, found, mine, lambda theirs, own: theirs > own)


def no_shrinking(query, key, value, places):
    """WRONG with 2 ranks ... When a block has a larger score, what was added up before must"""
    mine = places[dist.get_rank()]
    found = _blocks(key, value, places)
    return _attend(query, found, mine, lambda theirs, own: theirs > own, shrinks=False)


def mean_of_means(query, key, value, places):
    """WRONG with 2 ranks, tokens in zigzag ... This is the mean of the blocks' means."""
    mine = places[dist.get_rank()]
    total = torch.zeros_like(query)
    count = torch.zeros_like(query[..., :1])
    for theirs, keys, values in _blocks(key, value, places):
        scores = _scores(query, keys, theirs > mine[:, None])
        total += scores.softmax(dim=-1).nan_to_num() @ values
        count += scores.isfinite().any(dim=-1, keepdim=True)
    return total / count


def softmax_of_a_later_block(query, key, value, places):
    """WRONG with 2 ranks ... Where a whole block comes later than a token, its largest score"""
    mine = places[dist.get_rank()]
    total = torch.zeros_like(query)
    for theirs, keys, values in _blocks(key, value, places):
        total += _scores(query, keys, theirs > mine[:, None]).softmax(dim=-1) @ values
    return total


def no_maximum(query, key, value, places):
    """WRONG with 1 rank, large scores ... exp() of a large score overflows."""
    mine = places[dist.get_rank()]
    total = 0
    read = 0
    for theirs, keys, values in _blocks(key, value, places):
        weights = _scores(query, keys, theirs > mine[:, None]).exp()
        total = total + weights.sum(dim=-1, keepdim=True)
        read = read + weights @ values
    return read / total


def one_pass_more(query, key, value, places):
    """COSTLY with 2 ranks, tokens in zigzag ... After n - 1 steps, each rank has had the keys"""
    mine = places[dist.get_rank()]
    found = _blocks(key, value, places, passes=dist.get_world_size())
    return _attend(query, found, mine, lambda theirs, own: theirs > own)


def gathered(query, key, value, places):
    """WRONG with 1 rank ... dist.all_gather is what this exercise builds: send keys and values"""
    received = [torch.empty_like(key) for _ in places]
    dist.all_gather(received, key.contiguous())
    return received[0]


def equal_numbers(query, key, value, places):
    """CRASH with 2 ranks, ranks with different ... its buffer has ... places tells how many"""
    n = dist.get_world_size()
    rank = dist.get_rank()
    mine = places[rank]
    found = [(mine, key, value)]
    travelling = torch.stack([key, value])
    for step in range(1, n):
        travelling = _pass_on(travelling, len(mine))
        found.append((places[(rank - step) % n], *travelling))
    return _attend(query, found, mine, lambda theirs, own: theirs > own)


def all_send_first(query, key, value, places):
    """HANG with 2 ranks, tokens in zigzag ... rank 0 waits at your line ... dist.send(travelling"""
    n = dist.get_world_size()
    rank = dist.get_rank()
    travelling = torch.stack([key, value])
    received = torch.empty_like(travelling)
    if n > 1:
        dist.send(travelling, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
    mine = places[rank]
    return _attend(query, [(mine, key, value)], mine, lambda theirs, own: theirs > own)
