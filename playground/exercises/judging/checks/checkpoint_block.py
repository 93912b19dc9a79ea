"""How checkpoint_block is checked."""

import gc

import torch
from judging.single import gradients_of
from torch import nn

from instruments.facts import facts
from instruments.memory import Memory

NAME = "CheckpointBlock"
WORLD_SIZES = (1, 2)
CASES = {
    "an MLP": {"kind": "mlp"},
    "a block with LayerNorm, float64": {"kind": "norm"},
    "a block with dropout": {"kind": "dropout"},
    "inputs without a gradient": {"kind": "mlp", "learn_inputs": False},
    "a frozen layer, and a parameter that is not used": {"kind": "unused", "frozen": True},
}
RUNG_1 = "for blocks without random numbers"
RUNG_2 = "dropout, and inputs or parameters that need no gradient, or are not used."
CASES_OF_RUNG_1 = 2
ROWS = 512  # so that the inputs are much larger than the state of the random numbers
WIDTH = 16
KEPT = "kept until backward"
ENOUGH = "the inputs only"
BEFORE = "random numbers before backward"
AFTER = "random numbers after backward"
LIMITS = {"messages": 0}
HINTS = """
backward() has the inputs and the block, but no graph. What must it do to get one? And from which
tensor must this graph begin, so that it ends at the inputs, and not at the layers before them?

Inside `with torch.enable_grad():`, autograd records. Begin with inputs.detach() and
requires_grad_(...). torch.autograd.grad(output, tensors, gradient) returns the gradients of a list
of tensors, and adds nothing to any .grad. ctx.save_for_backward(...) keeps the inputs.

forward: save inputs, block and the state of the random numbers; return block(inputs)
backward: keep the state as it is now, and set the saved one
          inputs = a detached copy that requires a gradient if it needs one
          with torch.enable_grad(): output = block(inputs)
          set the state that was kept
          learned = those of [inputs, *parameters] that need a gradient
          gradients = torch.autograd.grad(output, learned, gradient)
          return None for the block, and then for each tensor its gradient or None
"""


def is_tensor(value):
    return isinstance(value, torch.Tensor)


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
    if kind == "unused":
        block.unused = nn.Parameter(torch.ones(WIDTH))
    if frozen:
        layers[0].requires_grad_(False)
    first = nn.Linear(WIDTH, WIDTH).requires_grad_(learn_inputs)
    images = torch.randn(ROWS, WIDTH) * (rank + 1)
    if kind == "norm":
        return block.double(), images.double(), first.double()
    return block, images, first


def result_of(output, block, first):
    found = {"the output": output.detach() if is_tensor(output) else output} | gradients_of(block)
    return found | {"the gradient of the layer before the block": first.weight.grad}


def run(checkpoint_block, rank, world_size, kind, **case):
    gc.freeze()  # what is there already is never searched, so gc.collect() is fast
    block, images, first = block_of(kind, rank, **case)
    inputs = first(images)
    torch.manual_seed(1)
    with Memory() as memory:
        output = checkpoint_block.apply(block, inputs, *block.parameters())
        before = torch.rand(3)  # as another layer would draw them
        # A copy of the inputs is nothing to complain about, nor is the state of the random numbers.
        enough = inputs.nbytes + torch.get_rng_state().nbytes
        nbytes = memory.kept(enough, inputs, output, before)
        if is_tensor(output) and output.requires_grad:
            loss_of(output).backward()
    kept = ENOUGH
    if nbytes > enough:
        kept = f"{nbytes} bytes more than the inputs ({inputs.nbytes} bytes)"
    found = {KEPT: kept} | result_of(output, block, first)
    return found | {BEFORE: before, AFTER: torch.rand(3)}


def expected(rank, world_size, kind, **case):
    block, images, first = block_of(kind, rank, **case)
    inputs = first(images)
    torch.manual_seed(1)
    output = block(inputs)
    before = torch.rand(3)
    loss_of(output).backward()
    found = {KEPT: ENOUGH} | result_of(output, block, first)
    return found | {BEFORE: before, AFTER: torch.rand(3)}


def loss_of(output):
    """Return a number whose gradient differs from column to column."""
    return (output * torch.arange(1, WIDTH + 1)).sum() / ROWS


class CheckpointBlock(torch.autograd.Function):
    """Why: backward() computes the block again from its input, with the same random numbers."""

    @staticmethod
    def forward(ctx, block, inputs, *parameters):
        ctx.save_for_backward(inputs)
        ctx.block = block
        ctx.parameters = parameters  # they are in memory anyway
        ctx.random_state = torch.get_rng_state()
        return block(inputs)

    @staticmethod
    def backward(ctx, gradient):
        (inputs,) = ctx.saved_tensors
        # A new leaf: hooks on the inputs themselves must not run a second time.
        inputs = inputs.detach().requires_grad_(ctx.needs_input_grad[1])
        state_now = torch.get_rng_state()
        torch.set_rng_state(ctx.random_state)
        with torch.enable_grad():
            output = ctx.block(inputs)
        torch.set_rng_state(state_now)
        tensors = [inputs, *ctx.parameters]
        learned = [tensor for tensor in tensors if tensor.requires_grad]
        # allow_unused: the gradient of a parameter that the block does not use is None.
        gradients = iter(torch.autograd.grad(output, learned, gradient, allow_unused=True))
        return None, *(next(gradients) if tensor.requires_grad else None for tensor in tensors)


COUNT = "CRASH.*an incorrect number of gradients"
WORDS = {
    "CRASH.*does not require grad": "autograd records nothing inside backward(), unless it "
    "computes inside `with torch.enable_grad():`. And some tensors need no gradient: see "
    "ctx.needs_input_grad.",
    COUNT: "backward() returns one value for each argument of forward(), after ctx.",
    KEPT: "What the block has computed stays in memory until backward. Keep only the inputs.",
    AFTER: "backward() draws the block's random numbers again. At its end, restore the state that "
    "was there at its beginning.",
    "dropout.*the gradient": "backward() must drop the numbers that forward() has dropped.",
}


def explain(trial):
    found = facts(trial.results, trial.expected)
    return TWICE if any("2 times what is expected" in fact for fact in found) else None


TWICE = "If backward() calls backward(), it adds to each .grad, and autograd adds what you return."
GRAD = "gradients = iter(torch"
RETURN = "return None, *(next(gradients) if tensor.requires_grad else None for tensor in tensors)"
MISTAKES = {
    "autograd records nothing inside backward()": ("with torch.enable_grad():", "if True:"),
    "some tensors need no gradient: see ctx.needs_input_grad.": (
        *("[tensor for tensor in tensors if tensor.requires_grad]", "tensors"),
    ),
    WORDS[COUNT]: (RETURN, RETURN.replace("None, *", "tuple", 1)),
    WORDS["dropout.*the gradient"]: ("torch.set_rng_state(ctx.random_state)", "pass"),
    WORDS[AFTER]: ("torch.set_rng_state(state_now)", "pass"),
    TWICE: (GRAD, f"output.backward(gradient, retain_graph=True); {GRAD}"),
}
