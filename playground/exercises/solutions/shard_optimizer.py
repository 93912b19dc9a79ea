"""Why: each rank updates 1/n of every parameter; an all_gather then brings it the other shards."""

import torch
import torch.distributed as dist


def padded(tensor):
    """Return a copy with one axis, with zeros at its end, so that n divides its length."""
    flat = tensor.detach().flatten()
    zeros = flat.new_zeros(-len(flat) % dist.get_world_size())
    return torch.cat([flat, zeros])


class ShardedOptimizer:
    """Updates all parameters of a model, but keeps only this rank's shard of the state."""

    def __init__(self, model, make_optimizer):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.shards = []
        for parameter in self.parameters:
            chunks = padded(parameter).chunk(dist.get_world_size())
            self.shards.append(chunks[dist.get_rank()].clone())
        self.optimizer = make_optimizer(self.shards)

    def step(self):
        """Update the parameters with the mean gradient over all ranks."""
        has_gradient = [float(each.grad is not None) for each in self.parameters]
        # NCCL cannot send CPU tensors.
        counts = torch.tensor(has_gradient, device=self.parameters[0].device)
        dist.all_reduce(counts)  # on how many ranks each gradient exists
        for parameter, shard, count in zip(self.parameters, self.shards, counts, strict=True):
            shard.grad = None
            if count > 0:
                missing = parameter.grad is None
                gradient = torch.zeros_like(parameter) if missing else parameter.grad
                shard.grad = torch.empty_like(shard)
                dist.reduce_scatter_tensor(shard.grad, padded(gradient) / dist.get_world_size())
        self.optimizer.step()
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            whole = padded(parameter)
            dist.all_gather_into_tensor(whole, shard)
            parameter.data.copy_(whole[: parameter.numel()].view_as(parameter))
