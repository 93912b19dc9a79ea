"""How outer_step is checked."""

from functools import partial

import torch
import torch.distributed as dist
from judging.traffic import sent_bytes

SGD = torch.optim.SGD
CASES = {
    "SGD, lr 1": {"make_optimizer": partial(SGD, lr=1.0)},
    "SGD with momentum": {"make_optimizer": partial(SGD, lr=0.7, momentum=0.9, nesterov=True)},
    "Adam": {"make_optimizer": partial(torch.optim.Adam, lr=0.1)},
}
SHAPES = {"matrix": (3, 4), "vector": (5,), "number": ()}
STEPS = (1, 2, 3)
STARTS = True
HINTS = """
An optimizer moves a tensor against its .grad. What must the .grad of a tensor in `agreed` be, so
that the tensor moves towards the mean of the ranks' parameters?

agreed[0].grad = tensor sets a gradient, and optimizer.step() uses it. torch.cat joins tensors with
one axis, so that one dist.all_reduce does for all. message.split(sizes) returns the parts as views,
part.view_as(tensor) gives a part its shape, and parameter.copy_(tensor) changes a parameter.

message = for all tensors, how far `agreed` is from this rank's parameters, joined
the mean of the messages over the ranks
its parts are the gradients of the tensors in `agreed`
optimizer.step()
copy `agreed` to the parameters
"""


def first():
    """Return the first parameters by name, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gone(name, rank, step):
    """Return how far a parameter of a rank goes while the rank trains alone."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(SHAPES[name], generator=generator)


def run(outer_step, rank, world_size, make_optimizer):
    agreed = first()
    parameters = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in agreed.items()}
    optimizer = make_optimizer(list(agreed.values()))
    results = {}
    for step in STEPS:
        for name, parameter in parameters.items():
            parameter.data += gone(name, rank, step)
        outer_step(list(parameters.values()), list(agreed.values()), optimizer)
        results |= results_of(step, agreed, parameters)
    return results


def results_of(step, agreed, parameters):
    results = {f"step {step}, agreed, {name}": agreed[name].clone() for name in SHAPES}
    for name in SHAPES:
        results[f"step {step}, parameters, {name}"] = parameters[name].detach().clone()
    return results


def expected(rank, world_size, make_optimizer):
    agreed = first()
    optimizer = make_optimizer(list(agreed.values()))
    results = {}
    for step in STEPS:
        for name, tensor in agreed.items():
            everyone = [gone(name, each, step) for each in range(world_size)]
            tensor.grad = -sum(everyone) / world_size
        optimizer.step()
        results |= results_of(step, agreed, agreed)
    return results


def limits(rank, world_size, make_optimizer):
    nbytes = sum(tensor.nbytes for tensor in first().values())
    messages = len(STEPS)
    return {"messages": messages, "bytes": messages * sent_bytes("all_reduce", nbytes, world_size)}


@torch.no_grad()
def outer_step(parameters, agreed, optimizer):
    """Why: the optimizer moves against the gradient, so the gradient points back to `agreed`."""
    ways = []
    for tensor, parameter in zip(agreed, parameters, strict=True):
        ways.append((tensor - parameter).flatten())
    message = torch.cat(ways)
    dist.all_reduce(message)
    message /= dist.get_world_size()
    sizes = [len(way) for way in ways]
    for tensor, mean in zip(agreed, message.split(sizes), strict=True):
        tensor.grad = mean.view_as(tensor)
    optimizer.step()
    for tensor, parameter in zip(agreed, parameters, strict=True):
        parameter.copy_(tensor)


WORDS = {
    "CRASH.*(a leaf Variable|a view of a leaf)": "A parameter requires a gradient, so change it "
    "inside torch.no_grad().",
    "messages;": "Join the tensors of all parameters with torch.cat, and send them in one message.",
}
REDUCE = "    dist.all_reduce(message)\n"
DIVIDE = "    message /= dist.get_world_size()\n"
EACH = "    for way in ways:\n        dist.all_reduce(way)\n    message = torch.cat(ways)\n"
MISTAKES = {
    "with the opposite sign": ("tensor - parameter", "parameter - tensor"),
    "changes by 2 times": (DIVIDE, ""),
    "The mean over the ranks is": (REDUCE + DIVIDE, ""),
    "Only `parameters` is wrong.": ("parameter.copy_(tensor)", "pass"),
    "SGD with momentum": ("optimizer.step()", "torch.optim.SGD(agreed, lr=1.0).step()"),
    WORDS["messages;"]: (f"    message = torch.cat(ways)\n{REDUCE}", EACH),
}
