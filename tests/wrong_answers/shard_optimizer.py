"""Wrong answers to shard_optimizer. See test_exercises.py for the docstrings."""

import torch
import torch.distributed as dist


def _padded(tensor):
    """Return a copy with one axis, padded so that n divides its length."""
    flat = tensor.detach().flatten()
    zeros = flat.new_zeros(-len(flat) % dist.get_world_size())
    return torch.cat([flat, zeros])


def _own(flat):
    """Return this rank's shard."""
    return flat.chunk(dist.get_world_size())[dist.get_rank()].clone()


class _Right:
    """A right answer in parts, of which the wrong answers replace one."""

    def __init__(self, model, make_optimizer):
        self.make_optimizer = make_optimizer
        self.parameters = self.chosen(model)
        self.shards = [_own(_padded(parameter)) for parameter in self.parameters]
        self.optimizer = make_optimizer(self.shards)

    def chosen(self, model):
        """Return the parameters that are sharded."""
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def counts(self):
        """Return on how many ranks each gradient exists."""
        counts = torch.tensor([float(each.grad is not None) for each in self.parameters])
        dist.all_reduce(counts)
        return counts.tolist()

    def gradient(self, parameter):
        """Return the gradient, or zeros."""
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def average(self, parameter, count):
        """Return this rank's shard of the mean gradient."""
        flat = _padded(self.gradient(parameter)) / dist.get_world_size()
        shard = torch.empty_like(_own(flat))
        dist.reduce_scatter_tensor(shard, flat)
        return shard

    def update(self):
        """Let the optimizer update the shards."""
        self.optimizer.step()

    def gather(self, parameter, shard):
        """Join the shards of all ranks."""
        whole = _padded(parameter)
        dist.all_gather_into_tensor(whole, shard)
        return whole

    def step(self):
        """Update the parameters."""
        counts = self.counts()
        for parameter, shard, count in zip(self.parameters, self.shards, counts, strict=True):
            shard.grad = self.average(parameter, count) if count > 0 else None
        self.update()
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            whole = self.gather(parameter, shard)
            parameter.data.copy_(whole[: parameter.numel()].view_as(parameter))


class WholeState(_Right):
    """WRONG with 2 ranks, SGD, two layers ... bytes of the optimizer's state: 196 expected ... 100
    Each rank keeps the whole state."""

    def __init__(self, model, make_optimizer):
        self.parameters = self.chosen(model)
        self.shards = [parameter.data for parameter in self.parameters]
        self.optimizer = make_optimizer(self.shards)

    def average(self, parameter, count):
        gradient = self.gradient(parameter) / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient

    def gather(self, parameter, shard):
        return shard.flatten()


class WholeParameters:
    """WRONG with 2 ranks, SGD, two layers ... Does a rank keep whole parameters?"""

    def __init__(self, model, make_optimizer):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        mine = self.parameters[dist.get_rank() :: dist.get_world_size()]
        self.optimizer = make_optimizer(mine) if mine else None

    def step(self):
        """Update the parameters."""
        counts = torch.tensor([float(each.grad is not None) for each in self.parameters])
        dist.all_reduce(counts)
        for parameter, count in zip(self.parameters, counts.tolist(), strict=True):
            if count > 0:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= dist.get_world_size()
                dist.all_reduce(parameter.grad)
        if self.optimizer:
            self.optimizer.step()
        for number, parameter in enumerate(self.parameters):
            message = parameter.detach().contiguous()
            dist.broadcast(message, number % dist.get_world_size())
            parameter.data.copy_(message)


class AllReduce(_Right):
    """COSTLY with 2 ranks, AdamW, tied and frozen parameters ... An all_reduce brings each rank the
    whole mean."""

    def average(self, parameter, count):
        flat = _padded(self.gradient(parameter)) / dist.get_world_size()
        dist.all_reduce(flat)
        return _own(flat)


class NotDivided(_Right):
    """WRONG with 2 ranks, SGD, two layers ... The optimizer gets the sum of the gradients."""

    def average(self, parameter, count):
        return super().average(parameter, count) * dist.get_world_size()


class DividedByTheCount(_Right):
    """WRONG with 2 ranks, SGD, missing gradients ... Divide by n. A rank without this gradient"""

    def average(self, parameter, count):
        return super().average(parameter, count) * (dist.get_world_size() / count)


class OwnGradients(_Right):
    """WRONG with 2 ranks, SGD, two layers ... The optimizer gets the gradients of its own rank"""

    def average(self, parameter, count):
        return _own(_padded(self.gradient(parameter)))


class NoGather(_Right):
    """WRONG with 2 ranks, SGD, two layers ... Only this rank's shard has changed."""

    def gather(self, parameter, shard):
        whole = _padded(parameter)
        whole.view(dist.get_world_size(), -1)[dist.get_rank()] = shard
        return whole


class NotCopied(_Right):
    """WRONG with 1 rank, SGD, two layers ... The parameters have not changed."""

    def gather(self, parameter, shard):
        super().gather(parameter, shard)
        return _padded(parameter)


class ANewOptimizerInEachStep(_Right):
    """WRONG with 1 rank, SGD, two layers ... The state is lost. Make the optimizer once"""

    def update(self):
        self.make_optimizer(self.shards).step()


class ZerosForTheUnused(_Right):
    """WRONG with 1 rank, SGD, missing gradients ... zeros move the parameter."""

    def counts(self):
        return [1.0] * len(self.parameters)


class ZerosChangeTheState(_Right):
    """WRONG with 1 rank, SGD, missing gradients rank 0, used_in_steps_1_and_3: ... Zeros change the
    state, and step 3."""

    def step(self):
        counts = self.counts()
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = self.average(parameter, 1)
        self.update()
        for parameter, shard, count in zip(self.parameters, self.shards, counts, strict=True):
            if count > 0:
                whole = self.gather(parameter, shard)
                parameter.data.copy_(whole[: parameter.numel()].view_as(parameter))


class DividedAfterwards(_Right):
    """WRONG with 2 ranks, SGD, small parameters ... inf ... too large for float16. Divide before"""

    def average(self, parameter, count):
        flat = _padded(self.gradient(parameter))
        shard = torch.empty_like(_own(flat))
        dist.reduce_scatter_tensor(shard, flat)
        return shard / dist.get_world_size()


class NoneIsForgotten(_Right):
    """CRASH with 1 rank, SGD, missing gradients ... NoneType ... A gradient is None if"""

    def counts(self):
        return [1.0] * len(self.parameters)

    def gradient(self, parameter):
        return parameter.grad.detach()


class FrozenOnesToo(_Right):
    """COSTLY with 2 ranks, AdamW, tied and frozen parameters ... Does a frozen parameter travel"""

    def chosen(self, model):
        return list(model.parameters())


class TiedOnesTwice(_Right):
    """WRONG with 1 rank, AdamW, tied and frozen parameters ... the tied parameter sharded twice?"""

    def chosen(self, model):
        named = model.named_parameters(remove_duplicate=False)
        return [parameter for _, parameter in named if parameter.requires_grad]


class NotPadded(_Right):
    """CRASH with 2 ranks, SGD, two layers ... padded(tensor) sees to that."""

    def average(self, parameter, count):
        flat = self.gradient(parameter).flatten() / dist.get_world_size()
        shard = torch.empty_like(_own(flat))
        dist.reduce_scatter_tensor(shard, flat)
        return shard


class NotDetached:
    """CRASH with 1 rank, SGD, two layers ... can't optimize a non-leaf Tensor ... detach()"""

    def __init__(self, model, make_optimizer):
        n = dist.get_world_size()
        chunks = [each.flatten().chunk(n)[dist.get_rank()] for each in model.parameters()]
        self.optimizer = make_optimizer(chunks)
