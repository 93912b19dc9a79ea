"""How split_pair is checked."""

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # backward(gradient) imports it: see ranks.py
from torch.nn import functional as F
from verdicts import Rung, difference

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
    """Call the learner's function on this rank, forward and backward."""
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
    """Return what run() should return."""
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
    """Compute the pair of layers in one process."""
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


def explain(outcome):
    """Put typical mistakes into words."""
    size = outcome.world_size
    if outcome.verdict == "COSTLY":
        return explain_costs(outcome)
    if outcome.verdict == "HANG":
        return None
    actual, right = outcome.of_rank()
    output = actual["the output"]
    tensors, _ = whole(**outcome.case)
    inputs, first, first_bias, second, second_bias = (
        None if tensor is None else tensor.detach() for tensor in tensors
    )
    if not isinstance(output, torch.Tensor):
        return "forward must return the output."
    if difference(output, right["the output"], {"rtol": 1e-4, "atol": 1e-5}):
        hidden = F.relu(F.linear(inputs, first, first_bias)).tensor_split(size, 1)
        columns = second.tensor_split(size, 1)
        term = F.linear(hidden[outcome.rank], columns[outcome.rank])
        bias = 0 if second_bias is None else second_bias
        if equal(output, term + bias):
            return "This is only this rank's term of the output. Add up over the ranks."
        if second_bias is not None and equal(output, right["the output"] + (size - 1) * bias):
            return f"second_bias was added {size} times, once on each rank. Add it after the sum."
        if second_bias is not None and equal(output, right["the output"] - bias):
            return "second_bias was not added."
        return None
    return explain_gradients(actual, right, size)


def equal(actual, expected):
    """Return whether two tensors are equal, apart from rounding."""
    return actual.shape == expected.shape and torch.allclose(actual, expected, 1e-4, 1e-5)


def explain_gradients(actual, right, size):
    """Say what is wrong with the gradients."""
    wrong = []
    for name in NAMES:
        place = f"the gradient of {name}"
        if difference(actual[place], right[place], {"rtol": 1e-4, "atol": 1e-5}):
            wrong.append(name)
    if any(actual[f"the gradient of {name}"] is None for name in wrong):
        missing = [name for name in wrong if actual[f"the gradient of {name}"] is None]
        return f"{missing[0]} has no gradient. backward() returns one for each argument, in order."
    if wrong == ["inputs"]:
        return (
            "All ranks have used `inputs`, each for its own rows of `first`. So its gradient is a "
            "sum over the ranks."
        )
    if all(is_several_times(actual, right, name, size) for name in wrong):
        return (
            f"{size} times what is expected, for {', '.join(wrong)}. The gradient g is the same on "
            "all ranks, so it must not be added up."
        )
    return None


def is_several_times(actual, right, name, size):
    """Return whether a gradient is `size` times what it should be."""
    place = f"the gradient of {name}"
    return equal(actual[place], size * right[place])


def explain_costs(outcome):
    """Say which messages are not needed."""
    mine = outcome.messages[outcome.rank]
    reduced = [message for message in mine if message.kind == "all_reduce"]
    if len(reduced) == 2 and not outcome.case.get("learn_inputs", True):
        return "`inputs` needs no gradient here, so backward needs no all_reduce."
    if len(reduced) > 2:
        return "One all_reduce is enough in forward, and one in backward."
    if len(reduced) < len(mine):
        return "The shards stay where they are. Only terms of a sum have to travel."
    return None


def explain_crash(crash):
    """Put typical errors into words."""
    if "NoneType" in crash.error or "gradient different than None" in crash.error:
        return "first_bias and second_bias may be None. Then backward returns None for them."
    return None
