"""How fault_wrong_gradient is checked."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from verdicts import difference

NAME = "train"
FAULT = "WRONG with 2 ranks, 1 step ... This is the mean of the ranks' gradients"
CASES = {
    "1 step": {"lengths": (2, 6, 1, 3, 5), "steps": 1},
    "3 steps with odd numbers of images": {"lengths": (5, 1, 7, 3, 9), "steps": 3},
    "no images on some ranks": {"lengths": (4, 0, 3, 0, 1), "steps": 2},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def make_model():
    """Return a small model, the same one on all ranks."""
    torch.manual_seed(1)
    return torch.nn.Linear(3, 2)


def part(rank, lengths):
    """Return the images and the labels of a rank."""
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(lengths[rank], 3, generator=generator) * (rank + 1)
    return images, torch.full((lengths[rank],), rank % 2)


def run(train, lengths, steps):
    """Call the learner's function on this rank."""
    model = make_model()
    train(model, *part(dist.get_rank(), lengths), steps)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trained(world_size, lengths, steps, weights=None):
    """Return the parameters after training in a single process.

    Args:
        weights: for each rank, how much one of its images counts; None: as in the mean.
    """
    images = [part(rank, lengths)[0] for rank in range(world_size)]
    labels = [part(rank, lengths)[1] for rank in range(world_size)]
    weights = weights or [1 / sum(lengths[:world_size])] * world_size
    counts = torch.tensor(weights).repeat_interleave(torch.tensor(lengths[:world_size]))
    model = make_model()
    for _ in range(steps):
        model.zero_grad()
        losses = F.cross_entropy(model(torch.cat(images)), torch.cat(labels), reduction="none")
        (losses * counts).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def expected(rank, world_size, lengths, steps):
    """Return what run() should return."""
    return trained(world_size, lengths, steps)


def explain(outcome):
    """Put typical mistakes into words."""
    if outcome.verdict != "WRONG":
        return None
    actual = outcome.results[outcome.rank]
    size = outcome.world_size
    lengths = outcome.case["lengths"][:size]
    total = sum(lengths)
    longest = max(lengths)
    shortest = min(lengths)
    if shortest == 0:
        return None
    guesses = {
        "This is the mean of the ranks' gradients, in which each rank counts the same.": [
            1 / length / size for length in lengths
        ],
        "This is the sum of the ranks' gradients. What must it be divided by?": [
            1 / length for length in lengths
        ],
        "This is the sum over all images. What must it be divided by?": [1] * size,
        "This is the sum over all images, divided by the number of ranks.": [1 / size] * size,
        f"This is {size} times too small: divided by the images and by the ranks.": [
            1 / total / size
        ]
        * size,
        f"This is the result if each rank had {longest} images.": [1 / longest / size] * size,
        "This is the step with this rank's own gradient only.": [
            1 / length if rank == outcome.rank else 0 for rank, length in enumerate(lengths)
        ],
    }
    for words, weights in guesses.items():
        guess = trained(size, outcome.case["lengths"], outcome.case["steps"], weights)
        if not difference(actual, guess, TOLERANCE):
            return words
    return None


def explain_crash(crash):
    """Put typical errors into words."""
    if "NoneType" in crash.error:
        return "A parameter has no gradient until backward() has been called: its grad is None."
    return None
