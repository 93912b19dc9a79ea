"""Wrong repairs of fault_averaged_experts. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


def _backward(model, tokens, goals):
    """Compute the gradients."""
    model.zero_grad()
    F.mse_loss(model(tokens), goals).backward()


def _average(parameters):
    """Average the gradients of some parameters."""
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def _step(model):
    """Change parameters by their gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def not_divided(model, tokens, goals, steps):
    """WRONG with 2 ranks ... expert 0, weight changes by 2 times its gradient. Each rank's loss"""
    for _ in range(steps):
        _backward(model, tokens, goals)
        _average(model.shared.parameters())
        _step(model)


def added_up_only(model, tokens, goals, steps):
    """WRONG with 2 ranks ... shared.weight changes by 2 times the mean gradient: added up"""
    for _ in range(steps):
        _backward(model, tokens, goals)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        _step(model)


def nothing_averaged(model, tokens, goals, steps):
    """WRONG with 2 ranks ... shared.weight changes by this rank's own gradient only, but it is a"""
    for _ in range(steps):
        _backward(model, tokens, goals)
        for parameter in model.experts.parameters():
            parameter.grad /= dist.get_world_size()
        _step(model)


def the_sum_of_experts(model, tokens, goals, steps):
    """WRONG with 2 ranks ... expert 0, weight changes by the sum over the experts of all ranks."""
    for _ in range(steps):
        _backward(model, tokens, goals)
        _average(model.shared.parameters())
        for parameter in model.experts.parameters():
            dist.all_reduce(parameter.grad)
        _step(model)


def divided_twice(model, tokens, goals, steps):
    """WRONG with 2 ranks ... expert 0, weight changes by its gradient, divided by 2 once more."""
    for _ in range(steps):
        _backward(model, tokens, goals)
        _average(model.shared.parameters())
        for parameter in model.experts.parameters():
            parameter.grad /= dist.get_world_size() ** 2
        _step(model)


def averages_parameters(model, tokens, goals, steps):
    """WRONG with 2 ranks ... rank 0, expert 0, weight: ... expected"""
    for _ in range(steps):
        _backward(model, tokens, goals)
        _step(model)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()


def only_ranks_with_tokens(model, tokens, goals, steps):
    """HANG with 2 ranks ... waits at your line ... the same collectives in the same order."""
    for _ in range(steps):
        _backward(model, tokens, goals)
        for parameter in model.experts.parameters():
            parameter.grad /= dist.get_world_size()
        if any(parameter.grad.any() for parameter in model.experts.parameters()):
            _average(model.shared.parameters())
        _step(model)
