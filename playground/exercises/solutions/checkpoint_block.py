"""Why: backward() computes the block again from its input, with the same random numbers."""

import torch


class CheckpointBlock(torch.autograd.Function):
    """A block that keeps only its input, and is computed once more in backward()."""

    @staticmethod
    def forward(ctx, block, inputs, *parameters):
        """Return block(inputs). `parameters` are those of the block, in order."""
        ctx.save_for_backward(inputs)
        ctx.block = block
        ctx.parameters = parameters  # they are in memory anyway
        ctx.random_state = torch.get_rng_state()
        return block(inputs)

    @staticmethod
    def backward(ctx, gradient):
        """Return None for the block, and the gradients of the inputs and of each parameter."""
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
