"""Why: a hook does not wait, and all ranks start messages in one order, from the last parameter."""

import torch
import torch.distributed as dist


def message_of(parameter):
    """Return the gradient divided by n, as a tensor with one axis, and a flag at its end.

    A missing gradient counts as zero. The flag is above 0 if this rank has a gradient. When such
    messages are added up over n ranks, the sum has the mean gradient. Its last number is above 0 if
    any rank has a gradient.
    """
    missing = parameter.grad is None
    gradient = torch.zeros_like(parameter) if missing else parameter.grad
    flag = gradient.new_tensor([0.0 if missing else 1.0])
    return torch.cat([gradient.detach().flatten(), flag]) / dist.get_world_size()


def overlap_gradients(model):
    """Register hooks that start messages with gradients. Returns finish(), which ends a step."""
    parameters = [each for each in model.parameters() if each.requires_grad][::-1]
    started = []  # a message and its request for each of the first parameters

    def start_next():
        message = message_of(parameters[len(started)])
        started.append((message, dist.all_reduce(message, async_op=True)))

    def on_gradient(_):
        while len(started) < len(parameters) and parameters[len(started)].grad is not None:
            start_next()

    def finish():
        while len(started) < len(parameters):  # for example if a gradient is missing
            start_next()
        for parameter, (message, request) in zip(parameters, started, strict=True):
            request.wait()
            if message[-1] > 0:
                parameter.grad = message[:-1].view_as(parameter)
        started.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)
    return finish
