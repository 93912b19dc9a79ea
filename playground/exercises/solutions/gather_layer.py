"""Why: backward() computes the forward pass again, so it needs only the inputs and the shard."""

import torch
import torch.distributed as dist


class GatherLayer(torch.autograd.Function):
    """A layer of which this rank keeps a shard. It is gathered in forward() and in backward()."""

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
