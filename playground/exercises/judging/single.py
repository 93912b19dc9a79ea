"""What several checks need: numbers that tell whose they are, models, means."""

import torch


def seeded(make):
    """Return make(), the same model wherever it is called."""
    torch.manual_seed(0)
    return make()


def digits_of(rank, shape, dtype=torch.float64):
    """Return a tensor of a rank: 1, 2, 3, ... times 10**rank. A sum tells whose numbers it has."""
    count = torch.Size(shape).numel()
    return (10**rank * torch.arange(1, count + 1)).to(dtype).view(shape)


def large_of(rank, shape):
    """Return a tensor of a rank, of which two are too large for float16 when they are added.

    Their means over 1 to 5 ranks are exact in float16.
    """
    positions = torch.arange(torch.Size(shape).numel()).view(shape)
    return 960 * (63 - positions % 4 - 2 * rank)


def mean_of(gradients):
    """Return the mean of the ranks' gradients, in which None counts as zero; None if all are."""
    existing = [gradient for gradient in gradients if gradient is not None]
    if not existing:
        return None
    total = sum(gradient.double() for gradient in existing)
    return (total / len(gradients)).to(existing[0].dtype)


def gradients_of(model, before=""):
    """Return the gradients of a model by name."""
    return {f"{before}the gradient of {name}": each.grad for name, each in model.named_parameters()}
