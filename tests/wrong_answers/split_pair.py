"""Wrong answers to split_pair. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


class _Pair(torch.autograd.Function):
    """What the wrong answers have in common. Each one replaces a part."""

    @staticmethod
    def forward(ctx, inputs, first, first_bias, second, second_bias):
        """The right forward pass."""
        hidden = F.relu(F.linear(inputs, first, first_bias))
        output = F.linear(hidden, second)
        dist.all_reduce(output)
        ctx.save_for_backward(inputs, first, hidden, second)
        return output if second_bias is None else output + second_bias

    @staticmethod
    def backward(ctx, gradient):
        """The right backward pass."""
        inputs, first, hidden, second = ctx.saved_tensors
        of_hidden = torch.where(hidden > 0, gradient @ second, 0)
        of_inputs = of_hidden @ first
        if ctx.needs_input_grad[0]:
            dist.all_reduce(of_inputs)
        of_first_bias = of_hidden.sum(0) if ctx.needs_input_grad[2] else None
        of_second_bias = gradient.sum(0) if ctx.needs_input_grad[4] else None
        return of_inputs, of_hidden.T @ inputs, of_first_bias, gradient.T @ hidden, of_second_bias


class BiasOnEachRank(_Pair):
    """WRONG with 2 ranks ... the output: ... second_bias was added 2 times, once on each rank."""

    @staticmethod
    def forward(ctx, inputs, first, first_bias, second, second_bias):
        """Add the bias before the sum."""
        hidden = F.relu(F.linear(inputs, first, first_bias))
        output = F.linear(hidden, second, second_bias)
        dist.all_reduce(output)
        ctx.save_for_backward(inputs, first, hidden, second)
        return output


class NoBias(_Pair):
    """WRONG with 1 rank ... second_bias was not added."""

    @staticmethod
    def forward(ctx, inputs, first, first_bias, second, second_bias):
        """Forget the second bias."""
        return _Pair.forward(ctx, inputs, first, first_bias, second, None)


class NoSumInForward(_Pair):
    """WRONG with 2 ranks ... This is only this rank's term of the output."""

    @staticmethod
    def forward(ctx, inputs, first, first_bias, second, second_bias):
        """Forget the all_reduce."""
        hidden = F.relu(F.linear(inputs, first, first_bias))
        ctx.save_for_backward(inputs, first, hidden, second)
        return F.linear(hidden, second, second_bias)


class NoSumInBackward(_Pair):
    """WRONG with 2 ranks ... the gradient of inputs: ... All ranks have used `inputs`, each for"""

    @staticmethod
    def backward(ctx, gradient):
        """Forget the all_reduce."""
        inputs, first, hidden, second = ctx.saved_tensors
        of_hidden = torch.where(hidden > 0, gradient @ second, 0)
        of_first_bias = of_hidden.sum(0) if ctx.needs_input_grad[2] else None
        of_second_bias = gradient.sum(0) if ctx.needs_input_grad[4] else None
        of_inputs = of_hidden @ first
        return of_inputs, of_hidden.T @ inputs, of_first_bias, gradient.T @ hidden, of_second_bias


class SumOfTheOutputsGradient(_Pair):
    """WRONG with 2 ranks ... 2 times what is expected, for first, first_bias, second,
    second_bias. The gradient g is the same on all ranks
    """

    @staticmethod
    def backward(ctx, gradient):
        """Add up the gradient of the output, as autograd of an all_reduce would."""
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        of_inputs, *others = _Pair.backward(ctx, gradient)
        return of_inputs / dist.get_world_size(), *others


class SumOfAllGradients(_Pair):
    """WRONG with 2 ranks ... 2 times what is expected, for second_bias. The gradient g"""

    @staticmethod
    def backward(ctx, gradient):
        """Add up the gradient of the bias, too."""
        gradients = list(_Pair.backward(ctx, gradient))
        if gradients[-1] is not None:
            dist.all_reduce(gradients[-1])
        return tuple(gradients)


class TooFewGradients(_Pair):
    """WRONG with 1 rank ... first_bias has no gradient. backward() returns one for each argument"""

    @staticmethod
    def backward(ctx, gradient):
        """Leave out the biases."""
        of_inputs, of_first, _, of_second, _ = _Pair.backward(ctx, gradient)
        return of_inputs, of_first, None, of_second, None


class AlwaysInBackward(_Pair):
    """COSTLY with 2 ranks, 60 hidden numbers, inputs without a gradient ... so backward needs no"""

    @staticmethod
    def backward(ctx, gradient):
        """Add up the gradient of the inputs, also if it is not needed."""
        of_inputs, *others = _Pair.backward(ctx, gradient)
        if not ctx.needs_input_grad[0]:
            dist.all_reduce(of_inputs)
        return of_inputs, *others


class GradientsForBiasesThatAreNone(_Pair):
    """CRASH with 1 rank, 60 hidden numbers, no biases ... first_bias and second_bias may be"""

    @staticmethod
    def backward(ctx, gradient):
        """Return five gradients without looking."""
        of_inputs, of_first, _, of_second, _ = _Pair.backward(ctx, gradient)
        inputs, first, hidden, second = ctx.saved_tensors
        of_hidden = torch.where(hidden > 0, gradient @ second, 0)
        return of_inputs, of_first, of_hidden.sum(0), of_second, gradient.sum(0)


class GathersTheShards(_Pair):
    """COSTLY with 2 ranks, 61 hidden numbers, float64 right numbers, but rank 0 sends ... The
    shards stay"""

    @staticmethod
    def forward(ctx, inputs, first, first_bias, second, second_bias):
        """Gather the shards of a parameter as well."""
        shards = [None] * dist.get_world_size()
        dist.all_gather_object(shards, second)
        return _Pair.forward(ctx, inputs, first, first_bias, second, second_bias)
