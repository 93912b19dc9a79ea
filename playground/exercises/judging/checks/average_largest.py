"""How average_largest is checked."""

import torch
import torch.distributed as dist
from judging.traffic import sent_bytes

CASES = {
    "200 numbers": {"shape": (200,)},
    "a matrix of 41 x 30": {"shape": (41, 30)},
    "50 numbers": {"shape": (5, 5, 2)},
}
STEPS = (1, 2, 3)
STARTS = True
HINTS = """
What a rank sends is a list of numbers, and a list of their positions. All ranks send equally many,
so two all_gathers do. What is not sent in this step is added to the gradient of the next one.

tensor.abs().topk(count).indices has the positions of the largest absolute values of a tensor with
one axis, and tensor[positions] their numbers. dist.all_gather(list of tensors, tensor) brings those
of all ranks. total.index_add_(0, positions, numbers) adds numbers at positions, also if a position
is there twice. unsent.copy_(tensor) changes `unsent` in place.

flat = the gradient and what was not sent before, added, with one axis
positions, numbers = those with the largest absolute values
gather both from all ranks
unsent = flat, with 0 at this rank's positions
return zeros, to which all ranks' numbers are added at their positions, divided by n
"""


def gradient_of(rank, step, shape):
    """Return the gradient of a rank. Some positions are large on all ranks, and negative."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    gradient = torch.randn(shape, generator=generator)
    gradient.view(-1)[step::100] -= 5
    return gradient


def count_of(shape):
    return -(-torch.Size(shape).numel() // 100)


def run(average_largest, rank, world_size, shape):
    unsent = torch.zeros(shape)
    results = {}
    for step in STEPS:
        mean = average_largest(gradient_of(rank, step, shape), unsent)
        results |= {f"step {step}": mean, f"step {step}, unsent": unsent.clone()}
    return results


def expected(rank, world_size, shape):
    rests = [torch.zeros(shape).flatten() for _ in range(world_size)]
    results = {}
    for step in STEPS:
        mean = torch.zeros(shape).flatten()
        for each, rest in enumerate(rests):
            rest += gradient_of(each, step, shape).flatten()
            largest = rest.abs().sort(descending=True).indices[: count_of(shape)]
            mean[largest] += rest[largest] / world_size
            rest[largest] = 0
        results[f"step {step}"] = mean.view(shape)
        results[f"step {step}, unsent"] = rests[rank].view(shape).clone()
    return results


def limits(rank, world_size, shape):
    nbytes = (4 + 8) * count_of(shape)
    nbytes = len(STEPS) * sent_bytes("all_gather", nbytes, world_size)
    return {"messages": 2 * len(STEPS), "bytes": nbytes}


def average_largest(gradient, unsent):
    """Why: what is too small to be sent stays in `unsent`, until it has added up to a large one."""
    flat = (gradient + unsent).flatten()
    count = -(-len(flat) // 100)
    positions = flat.abs().topk(count).indices
    numbers = flat[positions]
    all_positions = [torch.empty_like(positions) for _ in range(dist.get_world_size())]
    all_numbers = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(all_positions, positions)
    dist.all_gather(all_numbers, numbers)
    flat[positions] = 0
    unsent.copy_(flat.view_as(unsent))
    mean = torch.zeros_like(flat)
    mean.index_add_(0, torch.cat(all_positions), torch.cat(all_numbers))
    mean /= dist.get_world_size()
    return mean.view_as(gradient)


WORDS = {
    "bytes;": "Send only the largest numbers and their positions, and not all numbers.",
    "messages;": "One message for the numbers of a step and one for their positions are enough.",
}
INDEX_ADD = "mean.index_add_(0, torch.cat(all_positions), torch.cat(all_numbers))"
GATHER = "    dist.all_gather(all_numbers, numbers)\n"
ALL_REDUCE = "mean[positions] = numbers; dist.all_reduce(mean)"
MISTAKES = {
    "rank 0, step 2: [0, 0, -4.86146": ("(gradient + unsent)", "gradient.clone()"),
    "It is what `step 1` was at first.": ("    flat[positions] = 0\n", ""),
    "2 times what is expected": ("    mean /= dist.get_world_size()\n", ""),
    WORDS["bytes;"]: (GATHER, "", INDEX_ADD, ALL_REDUCE),
}
