"""How split_pair is checked."""

import torch
import torch.distributed as dist
from judging.attempt import Rung
from torch.nn import functional as F

NAME = "SplitPair"
RUNG_1 = Rung(
    cases=("60 hidden numbers",),
    words="for the lesson's pair",
    then="any width, no biases, frozen inputs, and no message that is not needed.",
)
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
    """Return the five arguments of a single rank, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, WIDTH), (hidden, WIDTH), (hidden,), (CLASSES, hidden), (CLASSES,)]
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    gradient = torch.randn(ROWS, CLASSES, generator=generator).to(dtype)
    for name, tensor in zip(NAMES, tensors, strict=True):
        tensor.requires_grad_(learn_inputs if name == "inputs" else not frozen)
    if not bias:
        tensors[2] = None
        tensors[4] = None
    return tensors, gradient


def shard_of(tensor, dim, rank, world_size):
    """Return a rank's shard of a parameter, as a parameter of its own."""
    if tensor is None:
        return None
    shard = tensor.detach().tensor_split(world_size, dim)[rank]
    return shard.clone().requires_grad_(tensor.requires_grad)


def run(split_pair, **case):
    (inputs, first, first_bias, second, second_bias), gradient = whole(**case)
    where = dist.get_rank(), dist.get_world_size()
    arguments = [
        inputs,
        shard_of(first, 0, *where),
        shard_of(first_bias, 0, *where),
        shard_of(second, 1, *where),
        second_bias,
    ]
    output = split_pair.apply(*arguments)
    if isinstance(output, torch.Tensor) and output.requires_grad:
        output.backward(gradient)
    found = {"the output": output}
    for name, tensor in zip(NAMES, arguments, strict=True):
        found[f"the gradient of {name}"] = None if tensor is None else tensor.grad
    return found


def expected(rank, world_size, **case):
    arguments, gradient = whole(**case)
    output = pair(*arguments)
    output.backward(gradient)
    found = {"the output": output.detach()}
    for name, tensor in zip(NAMES, arguments, strict=True):
        found[f"the gradient of {name}"] = None if tensor is None else tensor.grad
    for name, dim in (("first", 0), ("first_bias", 0), ("second", 1)):
        whole_gradient = found[f"the gradient of {name}"]
        if whole_gradient is not None:
            shard = whole_gradient.tensor_split(world_size, dim)[rank]
            found[f"the gradient of {name}"] = shard
    return found


def pair(inputs, first, first_bias, second, second_bias):
    hidden = F.relu(F.linear(inputs, first, first_bias))
    return F.linear(hidden, second, second_bias)


def limits(rank, world_size, hidden, dtype=torch.float32, learn_inputs=True, **others):
    """Return how much a rank may send. A single rank sends nothing, whatever it calls."""
    if world_size == 1:
        return {}
    forward = 2 * (world_size - 1) * ROWS * CLASSES * dtype.itemsize // world_size
    backward = 2 * (world_size - 1) * ROWS * WIDTH * dtype.itemsize // world_size
    if not learn_inputs:
        return {"messages": 1, "bytes": forward}
    return {"messages": 2, "bytes": forward + backward}


class SplitPair(torch.autograd.Function):
    """Why: the output is a sum over the ranks, and so is the gradient of the inputs."""

    @staticmethod
    def forward(ctx, inputs, first, first_bias, second, second_bias):
        """Return the whole output, (N, out). `inputs` is (N, in), and a bias may be None."""
        hidden = F.relu(F.linear(inputs, first, first_bias))
        output = F.linear(hidden, second)  # this rank's term of the output
        dist.all_reduce(output)
        ctx.save_for_backward(inputs, first, hidden, second)
        return output if second_bias is None else output + second_bias

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of the five arguments, None for a bias that is None."""
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
