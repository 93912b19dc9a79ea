"""Wrong answers to gather_layer. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _gathered(shard):
    """Return all shards."""
    flat = shard.new_empty(len(shard) * dist.get_world_size())
    dist.all_gather_into_tensor(flat, shard)
    return flat


def _mean_of_shard(gradient):
    """Return this rank's shard of the mean gradient."""
    shard = torch.empty_like(gradient.chunk(dist.get_world_size())[0])
    dist.reduce_scatter_tensor(shard, gradient / dist.get_world_size())
    return shard


class _Layer(torch.autograd.Function):
    """What the wrong answers have in common. Each one replaces a part."""

    @staticmethod
    def forward(ctx, inputs, shard, compute):
        """The right forward pass."""
        ctx.save_for_backward(inputs, shard)
        ctx.compute = compute
        return compute(inputs, _gathered(shard))

    @staticmethod
    def backward(ctx, gradient):
        """The right backward pass."""
        return _backward(ctx, gradient, _mean_of_shard)


def _backward(ctx, gradient, reduced, flat=None, learn_inputs=None):
    """Return the gradients. `reduced` turns that of the whole parameters into that of the shard."""
    inputs, shard = ctx.saved_tensors
    if flat is None:
        flat = _gathered(shard)
    if learn_inputs is None:
        learn_inputs = ctx.needs_input_grad[0]
    inputs = inputs.detach().requires_grad_(learn_inputs)
    flat.requires_grad_()
    with torch.enable_grad():
        output = ctx.compute(inputs, flat)
    torch.autograd.backward(output, gradient)
    of_shard = reduced(flat.grad) if ctx.needs_input_grad[1] else None
    return inputs.grad, of_shard, None


class Sum(_Layer):
    """WRONG with 2 ranks ... the gradient of its shard: ... 2 times what is expected: added"""

    @staticmethod
    def backward(ctx, gradient):
        """Forget to divide by the number of ranks."""
        n = dist.get_world_size()
        return _backward(ctx, gradient, lambda whole: _mean_of_shard(whole) * n)


class DividedTooLate(_Layer):
    """WRONG with 2 ranks, an embedding with large gradients, float16 ... The sum over the ranks is
    too large for float16. Divide before the reduce_scatter.
    """

    @staticmethod
    def backward(ctx, gradient):
        """Divide after the sum."""

        def reduced(whole):
            shard = torch.empty_like(whole.chunk(dist.get_world_size())[0])
            dist.reduce_scatter_tensor(shard, whole)
            return shard / dist.get_world_size()

        return _backward(ctx, gradient, reduced)


class OwnGradient(_Layer):
    """WRONG with 2 ranks ... This is a shard of this rank's own gradient. Those of the other"""

    @staticmethod
    def backward(ctx, gradient):
        """Forget the other ranks."""
        rank = dist.get_rank()
        n = dist.get_world_size()
        return _backward(ctx, gradient, lambda whole: whole.chunk(n)[rank])


class KeepsTheParameters(_Layer):
    """WRONG with 2 ranks ... kept until backward: 288 bytes more than the shard (144 bytes) and the
    inputs ... Save only the inputs and the shard, and gather again.
    """

    @staticmethod
    def forward(ctx, inputs, shard, compute):
        """Keep the whole parameters."""
        ctx.save_for_backward(inputs, shard)
        ctx.compute = compute
        ctx.flat = _gathered(shard)
        return compute(inputs, ctx.flat)

    @staticmethod
    def backward(ctx, gradient):
        """Use them."""
        return _backward(ctx, gradient, _mean_of_shard, ctx.flat)


class KeepsTheParametersForEver(_Layer):
    """WRONG with 2 ranks ... kept after backward: 576 bytes more ... The whole parameters, or their
    gradient, stay in memory.
    """

    buffer = None

    @staticmethod
    def backward(ctx, gradient):
        """Keep the buffer for the next step."""
        KeepsTheParametersForEver.buffer = _gathered(ctx.saved_tensors[1])
        return _backward(ctx, gradient, _mean_of_shard, KeepsTheParametersForEver.buffer)


class KeepsTheGraph(_Layer):
    """WRONG with 2 ranks ... kept until backward: ... The whole parameters, or what was computed"""

    @staticmethod
    def forward(ctx, inputs, shard, compute):
        """Record the computation already here."""
        ctx.save_for_backward(inputs, shard)
        ctx.inputs = inputs.detach().requires_grad_(ctx.needs_input_grad[0])
        ctx.flat = _gathered(shard).requires_grad_()
        with torch.enable_grad():
            ctx.output = compute(ctx.inputs, ctx.flat)
        return ctx.output.detach()

    @staticmethod
    def backward(ctx, gradient):
        """Use what was recorded."""
        torch.autograd.backward(ctx.output, gradient)
        of_shard = _mean_of_shard(ctx.flat.grad) if ctx.needs_input_grad[1] else None
        return ctx.inputs.grad, of_shard, None


class AllReduce(_Layer):
    """COSTLY with 2 ranks ... all_reduce brings each rank the whole gradient."""

    @staticmethod
    def backward(ctx, gradient):
        """Let each rank have the whole gradient."""

        def reduced(whole):
            dist.all_reduce(whole)
            return whole.chunk(dist.get_world_size())[dist.get_rank()] / dist.get_world_size()

        return _backward(ctx, gradient, reduced)


class AveragedInputs(_Layer):
    """WRONG with 2 ranks ... the gradient of its inputs: ... The inputs are this rank's own."""

    @staticmethod
    def backward(ctx, gradient):
        """Divide both gradients."""
        of_inputs, of_shard, _ = _backward(ctx, gradient, _mean_of_shard)
        if of_inputs is not None:
            of_inputs = of_inputs / dist.get_world_size()
        return of_inputs, of_shard, None


class NotDetached(_Layer):
    """WRONG with 1 rank ... 's `inputs`, too. Begin with inputs.detach()."""

    @staticmethod
    def backward(ctx, gradient):
        """Begin with the inputs themselves."""
        inputs, shard = ctx.saved_tensors
        flat = _gathered(shard).requires_grad_()
        with torch.enable_grad():
            output = ctx.compute(inputs, flat)
        output.backward(gradient)
        return inputs.grad, _mean_of_shard(flat.grad), None


class NothingForTheInputs(_Layer):
    """WRONG with 1 rank ... backward() has returned None for the gradient of its inputs."""

    @staticmethod
    def backward(ctx, gradient):
        """Leave out the gradient of the inputs."""
        return None, _backward(ctx, gradient, _mean_of_shard)[1], None


class NothingRecorded(_Layer):
    """CRASH with 1 rank, the numbers of a linear layer ... autograd records nothing inside
    backward(), unless"""

    @staticmethod
    def backward(ctx, gradient):
        """Forget enable_grad()."""
        inputs, shard = ctx.saved_tensors
        output = ctx.compute(inputs, _gathered(shard))
        output.backward(gradient)
        return inputs.grad, _mean_of_shard(output.grad), None


class WholeGradient(_Layer):
    """CRASH with 2 ranks, the numbers of a linear layer ... The gradient of `shard` has as many
    numbers as the"""

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient of the whole parameters."""
        return _backward(ctx, gradient, lambda whole: whole)


class IntegersLearn(_Layer):
    """CRASH with 1 rank, an embedding, float16 ... `inputs` may be integers."""

    @staticmethod
    def backward(ctx, gradient):
        """Let the inputs require a gradient without looking."""
        return _backward(ctx, gradient, _mean_of_shard, learn_inputs=True)


class FrozenToo(_Layer):
    """COSTLY with 2 ranks, a frozen linear layer ... The layer is frozen, so its gradient is not"""

    @staticmethod
    def backward(ctx, gradient):
        """Average the gradient of a frozen layer, too."""
        of_inputs, of_shard, _ = _backward(ctx, gradient, _mean_of_shard)
        if of_shard is None:
            _mean_of_shard(ctx.saved_tensors[1].repeat(dist.get_world_size()))
        return of_inputs, of_shard, None
