"""How split_pair is checked."""

import torch
import torch.distributed as dist
from torch.nn import functional as F

NAME = "SplitPair"
RUNG_1 = "for the lesson's pair"
RUNG_2 = "any width, no biases, frozen inputs, and no message that is not needed."
CASES = {
    "60 hidden numbers": {"hidden": 60},
    "61 hidden numbers, float64": {"hidden": 61, "dtype": torch.float64},
    "2 hidden numbers": {"hidden": 2},
    "60 hidden numbers, no biases": {"hidden": 60, "bias": False},
    "60 hidden numbers, inputs without a gradient": {"hidden": 60, "learn_inputs": False},
    "60 hidden numbers, frozen parameters": {"hidden": 60, "frozen": True},
}
WIDTH = 4  # of the inputs
CLASSES = 3  # the width of the output
ROWS = 5
NAMES = ("inputs", "first", "first_bias", "second", "second_bias")
DIMENSIONS = {"first": 0, "first_bias": 0, "second": 1}  # along which a parameter is split
HINTS = """
Compute on each rank what the docstring says, with its shards. Which results are then only this
rank's term of a sum? There is one in forward and one in backward. And which number must be added
only once, however many ranks there are?

dist.all_reduce(tensor) adds up in place. ctx.save_for_backward(...) keeps tensors for
ctx.saved_tensors. ctx.needs_input_grad has a boolean for each argument of forward.

forward: hidden = relu(linear(inputs, first, first_bias))
         output = linear(hidden, second), added up over the ranks
         add second_bias, once, after the sum
backward: the six lines of the docstring, and add up the gradient of inputs over the ranks
"""


def whole(hidden, dtype=torch.float32, bias=True, learn_inputs=True, frozen=False):
    """Return the arguments of a single rank by name, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (hidden, WIDTH), (hidden,), (CLASSES, hidden), (CLASSES,)]
    arguments = {}
    for name, shape in zip(NAMES, shapes, strict=True):
        tensor = torch.randn(shape, generator=generator).to(dtype)
        tensor.requires_grad_(learn_inputs if name == "inputs" else not frozen)
        arguments[name] = None if "bias" in name and not bias else tensor
    return arguments, torch.randn(ROWS, CLASSES, generator=generator).to(dtype)


def results_of(output, arguments):
    found = {"the output": output}
    for name, tensor in arguments.items():
        found[f"the gradient of {name}"] = None if tensor is None else tensor.grad
    return found


def shard_of(tensor, dim, rank, world_size):
    """Return a rank's shard of a parameter, as a parameter of its own."""
    shard = tensor.detach().tensor_split(world_size, dim)[rank]
    return shard.clone().requires_grad_(tensor.requires_grad)


def run(split_pair, rank, world_size, **case):
    arguments, gradient = whole(**case)
    for name, dim in DIMENSIONS.items():
        if arguments[name] is not None:
            arguments[name] = shard_of(arguments[name], dim, rank, world_size)
    output = split_pair.apply(*arguments.values())
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.backward(gradient)
    return results_of(output, arguments)


def expected(rank, world_size, **case):
    arguments, gradient = whole(**case)
    inputs, first, first_bias, second, second_bias = arguments.values()
    output = F.linear(F.relu(F.linear(inputs, first, first_bias)), second, second_bias)
    output.backward(gradient)
    found = results_of(output.detach(), arguments)
    for name, dim in DIMENSIONS.items():
        of_all = found[f"the gradient of {name}"]
        if of_all is not None:
            found[f"the gradient of {name}"] = of_all.tensor_split(world_size, dim)[rank]
    return found


def limits(rank, world_size, hidden, dtype=torch.float32, learn_inputs=True, **others):
    forward = 2 * (world_size - 1) * ROWS * CLASSES * dtype.itemsize // world_size
    backward = 2 * (world_size - 1) * ROWS * WIDTH * dtype.itemsize // world_size
    if not learn_inputs:
        return {"messages": 1, "bytes": forward}
    return {"messages": 2, "bytes": forward + backward}


class SplitPair(torch.autograd.Function):
    """Why: the output is a sum over the ranks, and so is the gradient of the inputs."""

    @staticmethod
    def forward(ctx, inputs, first, first_bias, second, second_bias):
        hidden = F.relu(F.linear(inputs, first, first_bias))
        output = F.linear(hidden, second)  # this rank's term of the output
        dist.all_reduce(output)
        ctx.save_for_backward(inputs, first, hidden, second)
        return output if second_bias is None else output + second_bias

    @staticmethod
    def backward(ctx, gradient):
        inputs, first, hidden, second = ctx.saved_tensors
        of_hidden = torch.where(hidden > 0, gradient @ second, 0)
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = of_hidden @ first  # this rank's term
            dist.all_reduce(of_inputs)
        of_first_bias = of_hidden.sum(0) if ctx.needs_input_grad[2] else None
        of_second_bias = gradient.sum(0) if ctx.needs_input_grad[4] else None
        return of_inputs, of_hidden.T @ inputs, of_first_bias, gradient.T @ hidden, of_second_bias


SUM = "dist.all_reduce(output)"
RESULT = "return of_inputs,"
WORDS = {
    "CRASH.*None": "first_bias and second_bias may be None. Then backward returns None for them.",
    "without a gradient.*;": "`inputs` needs no gradient here, so backward needs no all_reduce.",
    "messages;": "One all_reduce is enough in forward, and one in backward.",
    "bytes;": "The shards stay where they are. Only terms of a sum have to travel.",
}
MISTAKES = {
    WORDS["CRASH.*None"]: ("if ctx.needs_input_grad[2] else None", ""),
    WORDS["without a gradient.*;"]: ("if ctx.needs_input_grad[0]:", "if True:"),
    "The sum over the ranks is": ("            dist.all_reduce(of_inputs)\n", ""),
    "The ranks should have the same numbers": (SUM, "pass"),
    "Only `the output` is wrong.": (
        *("F.linear(hidden, second)", "F.linear(hidden, second, second_bias)"),
        *("output if second_bias is None else output + second_bias", "output"),
    ),
    "2 times what is expected": (
        *(RESULT, f"of_second_bias is None or dist.all_reduce(of_second_bias)\n        {RESULT}"),
    ),
}
