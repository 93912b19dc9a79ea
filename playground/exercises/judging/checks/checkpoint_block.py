"""How checkpoint_block is checked."""

import gc

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # backward(gradient) imports it: see ranks.py
from kept import Watching
from torch import nn
from verdicts import TOLERANCE, Rung, difference, times

NAME = "CheckpointBlock"
WORLD_SIZES = (1, 2)
CASES = {
    "an MLP": {"kind": "mlp"},
    "a block with LayerNorm, float64": {"kind": "norm"},
    "a block with dropout": {"kind": "dropout"},
    "inputs without a gradient": {"kind": "mlp", "learn_inputs": False},
    "a frozen layer": {"kind": "mlp", "frozen": True},
    "a parameter that is not used": {"kind": "unused"},
}
RUNG_1 = Rung(
    cases=("an MLP", "a block with LayerNorm, float64"),
    words="for blocks without random numbers",
    then="dropout, and inputs or parameters that need no gradient, or are not used.",
)
ROWS = 512  # so that the inputs are much larger than the state of the random numbers
WIDTH = 16
ENOUGH = "the inputs only"
BEFORE = "random numbers before backward"
AFTER = "random numbers after backward"


def is_tensor(value):
    """Return whether a value is a tensor."""
    return isinstance(value, torch.Tensor)


class Residual(nn.Module):
    """Adds what a module returns to its input."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, inputs):
        """Return a tensor like the inputs."""
        return inputs + self.module(inputs)


def block_of(kind, rank, frozen=False, learn_inputs=True):
    """Return a block, the same on all ranks, a tensor, and the first layer, which needs it.

    The tensor is different on each rank. The block's inputs are what the first layer returns.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH)]
    if kind == "norm":
        layers.insert(0, nn.LayerNorm(WIDTH))
    if kind == "dropout":
        layers.append(nn.Dropout(0.5))
    block = nn.Sequential(*layers)
    if kind != "mlp":
        block = Residual(block)
    if kind == "unused":
        block.unused = nn.Parameter(torch.ones(WIDTH))
    if frozen:
        layers[0].requires_grad_(False)
    first = nn.Linear(WIDTH, WIDTH).requires_grad_(learn_inputs)
    images = torch.randn(ROWS, WIDTH) * (rank + 1)
    if kind == "norm":
        return block.double(), images.double(), first.double()
    return block, images, first


class Noting(torch.autograd.Function):
    """Returns the inputs, and notes their gradient on its way to the layers before the block.

    (A hook on the inputs would also run when a learner's backward() asks for their gradient.)
    """

    @staticmethod
    def forward(ctx, inputs, gradients):
        """Return the same tensor."""
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)  # None stays None, and does not become zeros
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        """Note the gradient, and return it."""
        if gradient is not None:
            ctx.gradients.append(gradient)
        return gradient, None


def result_of(output, block, gradients, first):
    """Return what is compared of a step."""
    found = {"the output": output.detach() if is_tensor(output) else output}
    found["the gradient of inputs"] = sum(gradients) if gradients else None
    for name, parameter in block.named_parameters():
        found[f"the gradient of {name}"] = parameter.grad
    found["the gradient of the layer before the block"] = first.weight.grad
    return found


def run(checkpoint_block, kind, **case):
    """Call the learner's function on this rank, forward and backward."""
    gc.freeze()  # what is there already is never searched, so gc.collect() is fast
    block, images, first = block_of(kind, dist.get_rank(), **case)
    gradients = []
    inputs = Noting.apply(first(images), gradients)
    torch.manual_seed(1)
    with Watching() as memory:
        output = checkpoint_block.apply(block, inputs, *block.parameters())
        before = torch.rand(3)  # as another layer would draw them
        # A copy of the inputs is nothing to complain about, nor is the state of the random numbers.
        enough = inputs.nbytes + torch.get_rng_state().nbytes
        nbytes = memory.kept(enough, inputs, output, before)
        if is_tensor(output) and output.requires_grad:
            loss_of(output).backward()
    after = torch.rand(3)
    kept = ENOUGH
    if nbytes > enough:
        kept = f"{nbytes} bytes more than the inputs ({inputs.nbytes} bytes)"
    found = {"kept until backward": kept} | result_of(output, block, gradients, first)
    if kind == "dropout":
        found |= {BEFORE: before, AFTER: after}
    return found


def expected(rank, world_size, kind, **case):
    """Return what run() should return."""
    block, images, first = block_of(kind, rank, **case)
    gradients = []
    inputs = Noting.apply(first(images), gradients)
    torch.manual_seed(1)
    output = block(inputs)
    before = torch.rand(3)
    loss_of(output).backward()
    after = torch.rand(3)
    found = {"kept until backward": ENOUGH} | result_of(output, block, gradients, first)
    if kind == "dropout":
        found |= {BEFORE: before, AFTER: after}
    return found


def loss_of(output):
    """Return a number whose gradient differs from column to column."""
    return (output * torch.arange(1, WIDTH + 1)).sum() / ROWS


def limits(rank, world_size, **case):
    """Return how much a rank may send: nothing."""
    return {"messages": 0}


def explain(outcome):
    """Put typical mistakes into words."""
    if outcome.verdict != "WRONG":
        return None
    actual, right = outcome.of_rank()
    wrong = [name for name in right if difference(actual[name], right[name], TOLERANCE)]
    if "kept until backward" in wrong:
        return "What the block has computed stays in memory until backward. Keep only the inputs."
    if "the output" in wrong or BEFORE in wrong:
        if outcome.case["kind"] == "dropout":
            return "forward() must draw the random numbers that block(inputs) would draw."
        return None
    if wrong == [AFTER]:
        return (
            "backward() draws the block's random numbers again. At its end, restore the state that "
            "was there at its beginning."
        )
    missing = [name for name in wrong if actual[name] is None]
    if missing:
        return f"backward() has returned None for {missing[0].removeprefix('the gradient of ')}."
    factors = [times(actual[name], right[name]) for name in wrong if name != AFTER]
    if all(factor and abs(factor - 2) < 1e-2 for factor in factors):
        return (
            "2 times what is expected. If backward() calls backward(), this adds to each .grad, "
            "and autograd then adds what you return. Use torch.autograd.grad."
        )
    if outcome.case["kind"] == "dropout":
        return "backward() drops other numbers than forward() has dropped."
    return None


def explain_crash(crash):
    """Put typical errors into words."""
    if "does not require grad" in crash.error:
        return (
            "autograd records nothing inside backward(), unless it computes inside "
            "`with torch.enable_grad():`. And some tensors need no gradient: see "
            "ctx.needs_input_grad."
        )
    if "an incorrect number of gradients" in crash.error:
        return "backward() returns one value for each argument of forward(), after ctx."
    return None
