"""Why: the output is a sum over the ranks, and so is the gradient of the inputs, which all use."""

import torch
import torch.distributed as dist
from torch.nn import functional as F


class SplitPair(torch.autograd.Function):
    """Two linear layers with ReLU between them, of which this rank has a shard."""

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
