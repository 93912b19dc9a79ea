"""Why: each rank and step has a seed of its own, and a generator of its own draws the numbers."""

import torch
import torch.distributed as dist


def seeded_dropout(inputs, p, seed, step):
    """Drop numbers of `inputs` with the probability p. Differs between ranks and steps."""
    own_seed = seed + step * dist.get_world_size() + dist.get_rank()
    generator = torch.Generator(inputs.device).manual_seed(own_seed)
    random = torch.rand(inputs.shape, generator=generator, device=inputs.device)
    return torch.where(random < p, 0, inputs / (1 - p))
