"""Wrong answers to overlap_gradients. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _message(parameter):
    """Return the message with a gradient and its flag."""
    missing = parameter.grad is None
    gradient = torch.zeros_like(parameter) if missing else parameter.grad
    flag = gradient.new_tensor([0.0 if missing else 1.0])
    return torch.cat([gradient.detach().flatten(), flag]) / dist.get_world_size()


def _keep(parameter, message):
    """Keep the mean as the gradient, if any rank has one."""
    if message[-1] > 0:
        parameter.grad = message[:-1].view_as(parameter)


def _trained(model):
    """Return the parameters that are not frozen, the last one first."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad][::-1]


def after_backward(model):
    """WRONG with 1 rank, three layers ... but no message starts in time."""

    def finish():
        for parameter in _trained(model):
            message = _message(parameter)
            dist.all_reduce(message)
            _keep(parameter, message)

    return finish


def in_the_last_hook(model):
    """WRONG with 1 rank, three layers rank 0, step 1: numbers that travel when backward() comes to
    the first layer: 0 ... Start each one in a hook."""
    parameters = _trained(model)
    requests = []

    def on_gradient(_):
        if all(parameter.grad is not None for parameter in parameters) and not requests:
            start()

    def start():
        for parameter in parameters:
            message = _message(parameter)
            requests.append((parameter, message, dist.all_reduce(message, async_op=True)))

    def finish():
        if not requests:
            start()
        for parameter, message, request in requests:
            request.wait()
            _keep(parameter, message)
        requests.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)
    return finish


def _hooks(model, waits_in_hook=False, waits=True, all_parameters=False):
    """Start a message in each hook, whatever the order."""
    started = []

    def on_gradient(parameter):
        message = _message(parameter)
        request = dist.all_reduce(message, async_op=True)
        if waits_in_hook:
            request.wait()
        started.append((parameter, message, request))

    def finish():
        for parameter, message, request in started:
            if waits:
                request.wait()
            _keep(parameter, message)
        started.clear()

    for parameter in model.parameters() if all_parameters else _trained(model):
        parameter.register_post_accumulate_grad_hook(on_gradient)
    return finish


def waits_in_the_hook(model):
    """WRONG with 2 ranks, three layers ... a hook waits for a message ... but a hook waits."""
    return _hooks(model, waits_in_hook=True)


def never_waits(model):
    """WRONG with 2 ranks, three layers ... wait"""
    return _hooks(model, waits=False)


def frozen_ones_have_hooks(model):
    """CRASH with 1 rank, tied and frozen parameters ... for a frozen parameter"""
    return _hooks(model, all_parameters=True)


def as_backward_computes_them(model):
    """WRONG with 2 ranks, a different order on odd ranks ... Fix one order for all ranks."""
    return _hooks(model)


def _in_order(model, skips_missing=False, keeps_all=False, clears=True, ends=True, one=False):
    """Start the messages in a fixed order. With `one`, only the first one starts in a hook."""
    parameters = _trained(model)
    started = []

    def start_next():
        message = _message(parameters[len(started)])
        started.append((message, dist.all_reduce(message, async_op=True)))

    def on_gradient(_):
        count = 1 if one else len(parameters)
        while len(started) < count and parameters[len(started)].grad is not None:
            start_next()

    def finish():
        while ends and len(started) < len(parameters):
            if skips_missing and parameters[len(started)].grad is None:
                del parameters[len(started)]
            else:
                start_next()
        for parameter, (message, request) in zip(parameters, started, strict=False):
            request.wait()
            if keeps_all:
                message[-1] = 1
            _keep(parameter, message)
        if clears:
            started.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)
    return finish


def only_the_first_starts_in_a_hook(model):
    """WRONG with 1 rank, three layers ... to the first layer: 3 expected 30 ... Does each
    one have a hook?"""
    return _in_order(model, one=True)


def zeros_for_the_unused(model):
    """WRONG with 1 rank, missing gradients ... No rank has this gradient, so it stays None"""
    return _in_order(model, keeps_all=True)


def only_what_is_ready(model):
    """WRONG with 2 ranks, missing gradients ... This is the rank's own gradient."""
    return _in_order(model, ends=False)


def without_the_missing(model):
    """CRASH with 2 ranks, missing gradients ... its buffer has ... Is a gradient missing?"""
    return _in_order(model, skips_missing=True)


def keeps_the_messages(model):
    """WRONG with 1 rank, three layers ... Step 1 is right. What has finish() left behind"""
    return _in_order(model, clears=False)


def no_finish(model):
    """CRASH with 1 rank, three layers ... must return the function finish."""
    for parameter in _trained(model):
        parameter.register_post_accumulate_grad_hook(lambda each: dist.all_reduce(each.grad))
