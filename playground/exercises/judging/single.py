"""Trains in a single process, with whose parameters a check compares those of the ranks."""

import torch
import torch.distributed as dist

from judging.traffic import uncounted


def seeded(make):
    """Return make(), the same model wherever it is called."""
    torch.manual_seed(0)
    return make()


def together(parts):
    """Join pairs of tensors, such as the images and the labels of each rank."""
    firsts, seconds = zip(*parts, strict=True)
    return torch.cat(firsts), torch.cat(seconds)


def step(model, loss, lr=0.1):
    """Change the parameters of a model by a step of gradient descent."""
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= lr * parameter.grad


def mean_of(gradients):
    """Return the mean of the ranks' gradients, in which None counts as zero; None if all are."""
    existing = [gradient for gradient in gradients if gradient is not None]
    if not existing:
        return None
    total = sum(gradient.double() for gradient in existing)
    return (total / len(gradients)).to(existing[0].dtype)


def named(model):
    """Return the parameters of a model by name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gradients_of(model, before=""):
    """Return the gradients of a model by name."""
    return {f"{before}the gradient of {name}": each.grad for name, each in model.named_parameters()}


def of_all_ranks(value):
    """Return a list of what each rank has passed. These messages do not count."""
    found = [None] * dist.get_world_size()
    with uncounted():
        dist.all_gather_object(found, value)
    return found
