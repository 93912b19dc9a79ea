"""How gather_layer is checked."""

import gc
import math
import time

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # backward(gradient) imports it: see ranks.py
from judging.attempt import Rung
from judging.kept import Watching
from judging.words import difference, times
from torch import nn
from torch.func import functional_call

NAME = "GatherLayer"
CASES = {
    "the numbers of a linear layer": {"kind": "linear", "any_memory": True},
    "a linear layer": {"kind": "linear"},
    "a layer that is used twice, float64": {"kind": "twice"},
    "an embedding, float16": {"kind": "embedding"},
    "an embedding with large gradients, float16": {"kind": "embedding", "large": True},
    "a frozen linear layer": {"kind": "linear", "frozen": True},
    "inputs without a gradient": {"kind": "linear", "learn_inputs": False},
    "3 numbers": {"kind": "scale"},
}
RUNG_1 = Rung(
    cases=("the numbers of a linear layer",),
    words="for the numbers of a linear layer",
    then="the memory that stays taken, three messages, and any layer.",
)
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


class Twice(nn.Module):
    """Uses the same layer twice."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, inputs):
        """Apply the layer, tanh, and the layer again."""
        return self.layer(torch.tanh(self.layer(inputs)))


def layer_of(kind, rank):
    """Return a layer, the same on all ranks, and inputs, different on each rank."""
    torch.manual_seed(0)
    if kind == "embedding":
        layer = nn.Embedding(7, 5).half()
        return layer, torch.tensor([[rank, 1, 6]])
    if kind == "twice":
        layer = Twice().double()
        inputs = torch.randn(1, 5, dtype=torch.float64)
    elif kind == "scale":
        layer = nn.Linear(2, 1)
        inputs = torch.randn(2, 2)
    else:
        layer = nn.Linear(7, 9)
        inputs = torch.randn(1, 7)
    return layer, inputs * (rank + 1)


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


def gradient_of(output, large=False):
    """Return the gradient of an output: 1, 2, 3, ..., divided by 8.

    If it is large, each number is 28800. An embedding uses a row twice at most, so the gradient of
    a rank and the mean over the ranks fit into float16. The sum over the ranks does not.
    """
    if large:
        return torch.full_like(output, 28800)
    return torch.arange(1, output.numel() + 1).to(output.dtype).view(output.shape) / 8


def run(gather_layer, kind, frozen=False, learn_inputs=True, large=False, any_memory=False):
    """Call the learner's function on this rank, forward and backward."""
    gc.freeze()  # what is there already is never searched, so gc.collect() is fast
    rank = dist.get_rank()
    world_size = dist.get_world_size()
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
    with Watching() as memory:
        output = gather_layer.apply(inputs, shard, compute)
        until_backward = memory.kept(enough, inputs, shard, output)
        output.backward(gradient_of(output, large))
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


def expected(rank, world_size, kind, frozen=False, learn_inputs=True, large=False, **others):
    """Return what run() should return."""
    gradients = []
    for other in range(world_size):
        layer, inputs = layer_of(kind, other)
        flat = flat_of(layer, world_size).requires_grad_()
        inputs.requires_grad_(inputs.is_floating_point())
        output = functional_call(layer, parts(layer, flat), (inputs,))
        output.backward(gradient_of(output, large))
        gradients.append(flat.grad.double())
        if other == rank:
            mine = output.detach()
            of_inputs = inputs.grad
    mean = (sum(gradients) / world_size).to(flat.dtype)
    return {
        "the output": mine,
        "the gradient of its shard": None if frozen else mean.chunk(world_size)[rank],
        "the gradient of its inputs": of_inputs if learn_inputs else None,
        "kept until backward": ENOUGH,
        "kept after backward": ENOUGH,
    }


def own_gradient(rank, world_size, kind, large=False, **others):
    """Return a rank's shard of its own gradient."""
    layer, inputs = layer_of(kind, rank)
    flat = flat_of(layer, world_size).requires_grad_()
    output = functional_call(layer, parts(layer, flat), (inputs,))
    output.backward(gradient_of(output, large))
    return flat.grad.chunk(world_size)[rank]


def limits(rank, world_size, kind, frozen=False, **others):
    """Return how much a rank may send. With a single rank there is nothing to send."""
    if world_size == 1:
        return {}
    layer, _ = layer_of(kind, rank)
    shard = flat_of(layer, world_size).nbytes // world_size
    messages = 2 if frozen else 3
    return {"messages": messages, "bytes": messages * (world_size - 1) * shard}


class GatherLayer(torch.autograd.Function):
    """Why: backward() gathers and computes again, so only the inputs and the shard are kept."""

    @staticmethod
    def forward(ctx, inputs, shard, compute):
        """Return compute(inputs, flat), where flat has the shards of all ranks."""
        ctx.save_for_backward(inputs, shard)
        ctx.compute = compute
        flat = shard.new_empty(len(shard) * dist.get_world_size())
        dist.all_gather_into_tensor(flat, shard)
        return compute(inputs, flat)

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of inputs and shard, and None for compute."""
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


WORDS = {
    "CRASH.*invalid gradient at index 1": "The gradient of `shard` has as many numbers as the "
    "shard.",
    "CRASH.*does not require grad": "autograd records nothing inside backward(), unless it "
    "computes inside `with torch.enable_grad():`, with tensors that require a gradient.",
    "CRASH.*floating point": "`inputs` may be integers. ctx.needs_input_grad[0] shows whether "
    "they need a gradient.",
}


def explain(trial):
    """Put typical mistakes into words."""
    if trial.verdict == "COSTLY":
        return explain_costs(trial)
    if trial.verdict == "HANG":
        return None
    actual, right = trial.of_rank()
    wrong = [name for name in right if difference(actual[name], right[name], TOLERANCE)]
    if wrong[0] == "the output":
        return None
    if wrong[0] == "kept until backward":
        return (
            "The whole parameters, or what was computed from them, stay in memory until backward. "
            "Save only the inputs and the shard, and gather again."
        )
    if wrong[0] == "kept after backward":
        return "The whole parameters, or their gradient, stay in memory."
    if actual[wrong[0]] is None:
        return f"backward() has returned None for {wrong[0]}."
    if wrong[0] == "the gradient of its inputs":
        if trial.world_size == 1 and times(actual[wrong[0]], right[wrong[0]]):
            return (
                "Backward inside backward() has reached the caller's `inputs`, too. Begin with "
                "inputs.detach()."
            )
        return "The inputs are this rank's own. Neither add up nor average their gradient."
    if actual[wrong[0]].isinf().any():
        return "The sum over the ranks is too large for float16. Divide before the reduce_scatter."
    own = own_gradient(trial.rank, trial.world_size, **trial.case)
    factor = times(actual[wrong[0]], own)
    if factor and abs(factor - 1) < 1e-2:
        return "This is a shard of this rank's own gradient. Those of the other ranks are missing."
    return None


def explain_costs(trial):
    """Say which messages are not needed."""
    kinds = [message.kind for message in trial.messages[trial.rank]]
    if "all_reduce" in kinds:
        return "all_reduce brings each rank the whole gradient. A rank needs its shard of it."
    if kinds.count("reduce_scatter") == 1 and trial.case.get("frozen"):
        return "The layer is frozen, so its gradient is not needed."
    return None


MEAN = "flat.grad / dist.get_world_size())"
LEAF = "inputs.detach().requires_grad_(learn_inputs)"
MISTAKES = {
    "2 times what is expected: added": (MEAN, "flat.grad)"),
    "The sum over the ranks is too large for float16. Divide before the reduce_scatter.": (
        *(MEAN, "flat.grad); of_shard /= dist.get_world_size()"),
    ),
    "Begin with inputs.detach().": (LEAF, "inputs"),
    WORDS["CRASH.*does not require grad"]: ("with torch.enable_grad():", "if True:"),
    WORDS["CRASH.*invalid gradient at index 1"]: (
        "inputs.grad, of_shard",
        "inputs.grad, flat.grad",
    ),
    WORDS["CRASH.*floating point"]: ("requires_grad_(learn_inputs)", "requires_grad_()"),
}
