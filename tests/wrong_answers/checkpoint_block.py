"""Wrong answers to checkpoint_block. See test_exercises.py for the docstrings."""

import torch


class _Block(torch.autograd.Function):
    """What the wrong answers have in common. Each one replaces a part."""

    @staticmethod
    def forward(ctx, block, inputs, *parameters):
        """The right forward pass."""
        ctx.save_for_backward(inputs)
        ctx.block = block
        ctx.parameters = parameters
        ctx.random_state = torch.get_rng_state()
        return block(inputs)

    @staticmethod
    def backward(ctx, gradient):
        """The right backward pass."""
        inputs, output = _again(ctx)
        return _gradients(ctx, inputs, output, gradient)


def _again(ctx):
    """Compute the block again. Returns its inputs and its output."""
    (inputs,) = ctx.saved_tensors
    inputs = inputs.detach().requires_grad_(ctx.needs_input_grad[1])
    state_now = torch.get_rng_state()
    torch.set_rng_state(ctx.random_state)
    with torch.enable_grad():
        output = ctx.block(inputs)
    torch.set_rng_state(state_now)
    return inputs, output


def _gradients(ctx, inputs, output, gradient):
    """Return what backward() should return."""
    tensors = [inputs, *ctx.parameters]
    learned = [tensor for tensor in tensors if tensor.requires_grad]
    found = iter(torch.autograd.grad(output, learned, gradient))
    return None, *(next(found) if tensor.requires_grad else None for tensor in tensors)


class KeepsTheGraph(_Block):
    """WRONG with 1 rank, an MLP ... kept until backward: ... bytes more than the inputs (32768
    bytes) ... What the block has computed stays in memory until backward.
    """

    @staticmethod
    def forward(ctx, block, inputs, *parameters):
        """Record the computation already here."""
        ctx.parameters = parameters
        ctx.inputs = inputs.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            ctx.output = block(ctx.inputs)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient):
        """Use what was recorded."""
        return _gradients(ctx, ctx.inputs, ctx.output, gradient)


class NothingRecorded(_Block):
    """CRASH with 1 rank, an MLP ... autograd records nothing inside backward(), unless it"""

    @staticmethod
    def backward(ctx, gradient):
        """Forget enable_grad()."""
        (inputs,) = ctx.saved_tensors
        inputs = inputs.detach().requires_grad_()
        return _gradients(ctx, inputs, ctx.block(inputs), gradient)


class AddedTwice(_Block):
    """WRONG with 1 rank, an MLP ... 2 times what is expected. If backward() calls backward(), this
    adds to each .grad
    """

    @staticmethod
    def backward(ctx, gradient):
        """Let backward() add to .grad, and return this as well."""
        inputs, output = _again(ctx)
        torch.autograd.backward(output, gradient)
        return None, inputs.grad, *(parameter.grad for parameter in ctx.parameters)


class NothingForTheInputs(_Block):
    """WRONG with 1 rank, an MLP ... backward() has returned None for inputs."""

    @staticmethod
    def backward(ctx, gradient):
        """Leave out the gradient of the inputs."""
        _, _, *of_parameters = _Block.backward(ctx, gradient)
        return None, None, *of_parameters


class TooFewGradients(_Block):
    """CRASH with 1 rank, an MLP ... one value for each argument of forward(), after ctx."""

    @staticmethod
    def backward(ctx, gradient):
        """Forget that the block is an argument, too."""
        _, *gradients = _Block.backward(ctx, gradient)
        return tuple(gradients)


class OtherNumbers(_Block):
    """WRONG with 1 rank, a block with dropout ... backward() drops other numbers than forward()"""

    @staticmethod
    def backward(ctx, gradient):
        """Forget the state of the random numbers."""
        (inputs,) = ctx.saved_tensors
        inputs = inputs.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            output = ctx.block(inputs)
        return _gradients(ctx, inputs, output, gradient)


class StateNotPutBack(_Block):
    """WRONG with 1 rank, a block with dropout ... random numbers after backward ... restore the
    state that was there at its beginning.
    """

    @staticmethod
    def backward(ctx, gradient):
        """Leave the old state behind."""
        (inputs,) = ctx.saved_tensors
        inputs = inputs.detach().requires_grad_(ctx.needs_input_grad[1])
        torch.set_rng_state(ctx.random_state)
        with torch.enable_grad():
            output = ctx.block(inputs)
        return _gradients(ctx, inputs, output, gradient)


class SeededAnew(_Block):
    """WRONG with 1 rank, a block with dropout ... forward() must draw the random numbers that"""

    @staticmethod
    def forward(ctx, block, inputs, *parameters):
        """Use a seed in place of the state."""
        torch.manual_seed(7)
        return _Block.forward(ctx, block, inputs, *parameters)


class FrozenToo(_Block):
    """CRASH with 1 rank, a frozen layer ... some tensors need no gradient: see"""

    @staticmethod
    def backward(ctx, gradient):
        """Ask for the gradients of all tensors."""
        inputs, output = _again(ctx)
        learned = [inputs] if ctx.needs_input_grad[1] else []
        found = torch.autograd.grad(output, [*learned, *ctx.parameters], gradient)
        return None, *([] if learned else [None]), *found
