"""Wrong answers to average_gradients. See test_exercises.py for the docstrings."""

from collections import defaultdict

import torch
import torch.distributed as dist


def _trained(model):
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _fill(parameters):
    """Replace missing gradients with zeros."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _average(gradients, divide_first=True):
    """Average gradients of one dtype in one message."""
    message = torch.cat([gradient.flatten() for gradient in gradients])
    if divide_first:
        message /= dist.get_world_size()
    dist.all_reduce(message)
    if not divide_first:
        message /= dist.get_world_size()
    parts = message.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _remove_unused(model):
    """Set gradients to None if no rank has them. Costs a short message."""
    parameters = _trained(model)
    counts = torch.tensor([float(each.grad is not None) for each in parameters])
    dist.all_reduce(counts)
    _fill(parameters)
    used = [each for each, count in zip(parameters, counts, strict=True) if count > 0]
    for parameter in parameters:
        if not any(parameter is each for each in used):
            parameter.grad = None
    return used, counts[counts > 0]


def _by_dtype(parameters):
    """Return a list of the gradients of each dtype."""
    buckets = defaultdict(list)
    for parameter in parameters:
        buckets[parameter.dtype].append(parameter.grad)
    return buckets.values()


def none_is_forgotten(model):
    """CRASH with 1 rank, tied and frozen parameters ... NoneType ... A gradient is None if the
    parameter is frozen"""
    _average([parameter.grad for parameter in model.parameters()])


def own_gradients_only(model):
    """CRASH with 2 ranks, missing gradients ... its buffer has ... messages of different lengths"""
    gradients = [parameter.grad for parameter in model.parameters()]
    _average([gradient for gradient in gradients if gradient is not None])


def one_by_one_if_not_none(model):
    """COSTLY with 1 rank, tied and frozen parameters ... 6 messages; 2 are enough ... Join the
    gradients"""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


def zeros_for_all(model):
    """WRONG with 1 rank, missing gradients ... No rank has this gradient, so it stays None"""
    parameters = _trained(model)
    _fill(parameters)
    _average([parameter.grad for parameter in parameters])


def frozen_ones_get_zeros(model):
    """WRONG with 1 rank, tied and frozen parameters ... This parameter is frozen"""
    _fill(model.parameters())
    _average([parameter.grad for parameter in model.parameters()])


def not_averaged(model):
    """WRONG with 2 ranks, two layers ... 2 times what is expected: added up over the ranks"""
    used, _ = _remove_unused(model)
    for gradients in _by_dtype(used):
        _average(gradients)
    for parameter in used:
        parameter.grad *= dist.get_world_size()


def one_message_of_float64(model):
    """CRASH with 1 rank, three dtypes ... All numbers of a message have the same dtype."""
    used, _ = _remove_unused(model)
    message = torch.cat([parameter.grad.flatten() for parameter in used])
    message /= dist.get_world_size()
    dist.all_reduce(message)
    parts = message.split([parameter.numel() for parameter in used])
    for parameter, part in zip(used, parts, strict=True):
        parameter.grad = part.view_as(parameter)


def not_copied_back(model):
    """WRONG with 2 ranks, two layers ... This is the rank's own gradient."""
    used, _ = _remove_unused(model)
    message = torch.cat([parameter.grad.flatten() for parameter in used])
    message /= dist.get_world_size()
    dist.all_reduce(message)


def mean_of_those_that_have_one(model):
    """WRONG with 2 ranks, missing gradients ... Divide by the number of ranks."""
    used, counts = _remove_unused(model)
    for gradients in _by_dtype(used):
        _average(gradients)
    for parameter, count in zip(used, counts, strict=True):
        parameter.grad *= dist.get_world_size() / count


def kept_where_it_was_missing(model):
    """WRONG with 2 ranks, missing gradients ... None ... so all ranks get the mean."""
    parameters = _trained(model)
    missing = [parameter for parameter in parameters if parameter.grad is None]
    used, _ = _remove_unused(model)
    for gradients in _by_dtype(used):
        _average(gradients)
    for parameter in missing:
        parameter.grad = None


def zeros_count_as_none(model):
    """WRONG with 2 ranks, missing gradients rank 1, the gradient of zeros_on_rank_0: None ... Test
    whether it is None."""
    parameters = _trained(model)
    flags = []
    for parameter in parameters:
        has_numbers = parameter.grad is not None and parameter.grad.any()
        flags.append(1.0 if has_numbers else 0.0)
    counts = torch.tensor(flags)
    dist.all_reduce(counts)
    used = [each for each, count in zip(parameters, counts, strict=True) if count > 0]
    _fill(used)
    for gradients in _by_dtype(used):
        _average(gradients)


def divided_afterwards(model):
    """WRONG with 2 ranks, three dtypes ... inf ... too large for float16. Divide before"""
    used, _ = _remove_unused(model)
    for gradients in _by_dtype(used):
        _average(gradients, divide_first=False)


def all_dtypes_in_one(model):
    """COSTLY with 2 ranks, three dtypes ... Does torch.cat join several dtypes?"""
    used, _ = _remove_unused(model)
    _average([parameter.grad for parameter in used])


def tied_ones_twice(model):
    """COSTLY with 2 ranks, tied and frozen parameters ... The tied parameter travels twice."""
    _remove_unused(model)
    named = model.named_parameters(remove_duplicate=False)
    gradients = [parameter.grad for _, parameter in named]
    _average([gradient for gradient in gradients if gradient is not None])


def frozen_ones_travel(model):
    """COSTLY with 2 ranks, tied and frozen parameters ... The frozen parameters travel as well."""
    _remove_unused(model)
    gradients = []
    for parameter in model.parameters():
        missing = parameter.grad is None
        gradients.append(torch.zeros_like(parameter) if missing else parameter.grad)
    _average(gradients)


def view_for_flatten(model):
    """CRASH with 1 rank, tied and frozen parameters ... view() needs numbers in the order"""
    used, _ = _remove_unused(model)
    torch.cat([parameter.grad.view(-1) for parameter in used])
    _average([parameter.grad for parameter in used])
