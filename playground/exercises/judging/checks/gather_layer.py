"""How gather_layer is checked."""

import gc
import math

import torch
import torch.distributed as dist
from judging.single import mean_of
from torch import nn
from torch.func import functional_call

from watch_ranks.memory import Memory

NAME = "GatherLayer"
CASES = {
    "the numbers of a linear layer": {"kind": "linear", "any_memory": True},
    "a linear layer": {"kind": "linear"},
    "an embedding with large gradients, float16": {"kind": "embedding"},
    "a frozen linear layer": {"kind": "linear", "frozen": True},
    "inputs without a gradient": {"kind": "linear", "learn_inputs": False},
    "3 numbers, float64": {"kind": "scale"},
}
RUNG_1 = "for the numbers of a linear layer"
RUNG_2 = "the memory that stays taken, three messages, and any layer."
TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}  # for float16
ENOUGH = "no more than the shard and the inputs"
HINTS = """
Do in backward() what forward() has done, but with autograd: gather, compute, and then backward() of
what was computed. What is the gradient of the whole parameters needed for?

dist.all_gather_into_tensor(flat, shard) and dist.reduce_scatter_tensor(of_shard, of_flat). Inside
`with torch.enable_grad():`, autograd records. Start from inputs.detach().requires_grad_(True).
ctx.save_for_backward(...) keeps tensors, and copies none.

forward: save inputs, shard and compute; flat = all shards; return compute(inputs, flat)
backward: flat = all shards; let inputs and flat require a gradient if they need one
          with torch.enable_grad(): output = compute(inputs, flat)
          output.backward(gradient)
          the gradient of shard = reduce_scatter of flat.grad / n
          return inputs.grad, the gradient of shard, None
"""


def layer_of(kind, rank):
    """Return a layer, the same on all ranks, and inputs, different on each rank."""
    torch.manual_seed(0)
    if kind == "embedding":
        return nn.Embedding(7, 5).half(), torch.tensor([[rank, 1, 6]])
    if kind == "scale":
        return nn.Linear(2, 1).double(), torch.randn(2, 2, dtype=torch.float64) * (rank + 1)
    return nn.Linear(7, 9), torch.randn(1, 7) * (rank + 1)


def parts(layer, flat):
    """Return the parameters in a flat tensor by name. They are views of it."""
    found = {}
    start = 0
    for name, parameter in layer.named_parameters():
        end = start + parameter.numel()
        found[name] = flat[start:end].view(parameter.shape)
        start = end
    return found


def flat_of(layer, world_size):
    """Return the parameters as one flat tensor with zeros at its end, cut into equal shards."""
    numbers = torch.cat([parameter.detach().flatten() for parameter in layer.parameters()])
    zeros = numbers.new_zeros(-len(numbers) % world_size)
    return torch.cat([numbers, zeros])


def gradient_of(output):
    """Return the gradient of an output: 1, 2, 3, ..., divided by 8.

    In float16, each number is 28800. An embedding uses a row twice at most, so the gradient of a
    rank and the mean over the ranks fit into float16. The sum over the ranks does not.
    """
    if output.dtype == torch.float16:
        return torch.full_like(output, 28800)
    return torch.arange(1, output.numel() + 1).to(output.dtype).view(output.shape) / 8


def run(gather_layer, rank, world_size, kind, frozen=False, learn_inputs=True, any_memory=False):
    gc.freeze()  # what is there already is never searched, so gc.collect() is fast
    layer, inputs = layer_of(kind, rank)
    shard = flat_of(layer, world_size).chunk(world_size)[rank].clone()
    shard.requires_grad_(not frozen)
    inputs.requires_grad_(learn_inputs and inputs.is_floating_point())
    layer = layer.to("meta")  # now the whole parameters are nowhere on this rank
    count = len(shard) * world_size

    def compute(inputs, flat):
        if flat.shape != (count,):
            raise ValueError(f"compute() got {tuple(flat.shape)}, not {count} numbers")
        return functional_call(layer, parts(layer, flat), (inputs,))

    # A copy of these is nothing to complain about. On a single rank, the shard is the whole.
    enough = shard.nbytes + inputs.nbytes
    if world_size == 1 or any_memory:
        enough = math.inf
    with Memory() as memory:
        output = gather_layer.apply(inputs, shard, compute)
        until_backward = memory.kept(enough, inputs, shard, output)
        output.backward(gradient_of(output))
    output = output.detach()
    afterwards = 0
    if until_backward <= enough:
        afterwards = memory.kept(enough, inputs, shard, output, inputs.grad, shard.grad)
    return {
        "the output": output,
        "the gradient of its shard": shard.grad,
        "the gradient of its inputs": inputs.grad,
        "kept until backward": in_words(until_backward, enough, shard),
        "kept after backward": in_words(afterwards, enough, shard),
    }


def in_words(nbytes, enough, shard):
    """Return in words how much memory is taken in addition to the shard and the inputs."""
    if nbytes <= enough:
        return ENOUGH
    return f"{nbytes} bytes more than the shard ({shard.nbytes} bytes) and the inputs"


def whole(rank, world_size, kind):
    """Compute with the whole layer and a rank's inputs. Returns the output and two gradients."""
    layer, inputs = layer_of(kind, rank)
    flat = flat_of(layer, world_size).requires_grad_()
    inputs.requires_grad_(inputs.is_floating_point())
    output = functional_call(layer, parts(layer, flat), (inputs,))
    output.backward(gradient_of(output))
    return output.detach(), flat.grad, inputs.grad


def expected(rank, world_size, kind, frozen=False, learn_inputs=True, any_memory=False):
    output, _, of_inputs = whole(rank, world_size, kind)
    mean = mean_of([whole(other, world_size, kind)[1] for other in range(world_size)])
    return {
        "the output": output,
        "the gradient of its shard": None if frozen else mean.chunk(world_size)[rank],
        "the gradient of its inputs": of_inputs if learn_inputs else None,
        "kept until backward": ENOUGH,
        "kept after backward": ENOUGH,
    }


def limits(rank, world_size, kind, frozen=False, **others):
    layer, _ = layer_of(kind, rank)
    shard = flat_of(layer, world_size).nbytes // world_size
    messages = 2 if frozen else 3
    return {"messages": messages, "bytes": messages * (world_size - 1) * shard}


class GatherLayer(torch.autograd.Function):
    """Why: backward() gathers and computes again, so only the inputs and the shard are kept."""

    @staticmethod
    def forward(ctx, inputs, shard, compute):
        ctx.save_for_backward(inputs, shard)
        ctx.compute = compute
        flat = shard.new_empty(len(shard) * dist.get_world_size())
        dist.all_gather_into_tensor(flat, shard)
        return compute(inputs, flat)

    @staticmethod
    def backward(ctx, gradient):
        learn_inputs, learn_shard, _ = ctx.needs_input_grad
        inputs, shard = ctx.saved_tensors
        flat = shard.new_empty(len(shard) * dist.get_world_size())
        dist.all_gather_into_tensor(flat, shard)
        inputs = inputs.detach().requires_grad_(learn_inputs)
        flat.requires_grad_(learn_shard)
        with torch.enable_grad():
            output = ctx.compute(inputs, flat)
        torch.autograd.backward(output, gradient)
        of_shard = None
        if learn_shard:
            of_shard = torch.empty_like(shard)
            dist.reduce_scatter_tensor(of_shard, flat.grad / dist.get_world_size())
        return inputs.grad, of_shard, None


GRADIENT = "CRASH.*invalid gradient at index 1"
NO_GRAPH = "CRASH.*does not require grad"
INTEGERS = "CRASH.*floating point"
INFINITE = r"shard: \[[^]]*inf"
WORDS = {
    GRADIENT: "The gradient of `shard` has as many numbers as the shard.",
    NO_GRAPH: "autograd records nothing inside backward(), unless it computes inside `with "
    "torch.enable_grad():`, with tensors that require a gradient.",
    INTEGERS: "`inputs` may be integers. ctx.needs_input_grad[0] shows whether they need a "
    "gradient.",
    "frozen.*bytes;": "The gradient of a frozen layer is not needed, so it need not be sent.",
    "messages;|bytes;": "Two all_gathers and one reduce_scatter are enough. A rank needs only its "
    "shard of the gradient.",
    "kept until backward: [0-9]": "The whole parameters, or what was computed from them, stay in "
    "memory until backward. Save only the inputs and the shard, and gather again.",
    INFINITE: "The sum over the ranks is too large for float16. Divide before the reduce_scatter.",
}
MEAN = "flat.grad / dist.get_world_size())"
LEAF = "inputs.detach().requires_grad_(learn_inputs)"
MISTAKES = {
    "2 times what is expected": (MEAN, "flat.grad)"),
    WORDS[INFINITE]: (MEAN, "flat.grad); of_shard /= dist.get_world_size()"),
    "the gradient of its inputs: [": (LEAF, "inputs"),
    WORDS[NO_GRAPH]: ("with torch.enable_grad():", "if True:"),
    WORDS[GRADIENT]: ("inputs.grad, of_shard", "inputs.grad, flat.grad"),
    WORDS[INTEGERS]: ("requires_grad_(learn_inputs)", "requires_grad_()"),
    WORDS["frozen.*bytes;"]: ("if learn_shard:", "if True:", "(learn_shard)", "()"),
}
