"""Why: sums over blocks can be added up, if they shrink whenever the maximum becomes larger."""

import torch
import torch.distributed as dist


def ring_attention(query, key, value, places):
    """Return what this rank's tokens read from the tokens of all ranks."""
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
    right = dist.P2POp(dist.isend, tensor, (rank + 1) % n)
    left = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for request in dist.batch_isend_irecv([right, left]):
        request.wait()
    return received
