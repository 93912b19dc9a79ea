"""How shard_optimizer is checked."""

from functools import partial

import torch
import torch.distributed as dist
from judging.checks.average_gradients import tied_and_frozen, two_layers
from judging.single import large_of, mean_of, seeded
from judging.traffic import sent_bytes
from shard_optimizer import padded
from torch import nn


def small():
    """Return parameters with few numbers, of float16."""
    tensors = {"scale": torch.tensor(2.0), "three": torch.ones(3), "view": torch.ones(7, 2).t()}
    return nn.ParameterDict({name: tensor.half() for name, tensor in tensors.items()})


def unused():
    """Return parameters that have no gradient in some steps, on some ranks, or at all."""
    names = ("used", "used_in_step_1", "used_on_rank_0", "unused")
    return nn.ParameterDict({name: torch.ones(6) for name in names})


SGD = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1)
CASES = {
    "SGD, two layers": {"make": two_layers, "make_optimizer": SGD},
    "AdamW, tied and frozen parameters": {"make": tied_and_frozen, "make_optimizer": ADAMW},
    "SGD, small parameters": {"make": small, "make_optimizer": SGD},
    "SGD, missing gradients": {"make": unused, "make_optimizer": SGD},
}
RUNG_1 = "for the lesson's own model"
RUNG_2 = "any model, such as one with a frozen parameter, whose gradient is None."
NAME = "ShardedOptimizer"
STEPS = (1, 2, 3)
# How many numbers an optimizer keeps for each number of a parameter.
MOMENTS = {torch.optim.SGD: 1, torch.optim.AdamW: 2}
SLACK = 8  # bytes that each parameter may cost in addition
STATE = "bytes of the optimizer's state"
HINTS = """
An all_reduce is a reduce_scatter and an all_gather. What can a rank do with its shard of the mean
gradient between the two?

padded(parameter).chunk(n)[rank] is this rank's shard. dist.reduce_scatter_tensor(shard, flat) adds
flat tensors over the ranks, and each rank gets its shard of the sum.
dist.all_gather_into_tensor(flat, shard) joins the shards of all ranks. parameter.data.copy_(tensor)
changes a parameter.

__init__: a shard of each trained parameter; make_optimizer(shards)
step: find out which gradients exist on any rank (NCCL cannot send CPU tensors, so make the message
    on the device of the parameters); the others stay None
    shard.grad = this rank's shard of the mean gradient
    self.optimizer.step()
    gather the shards of each parameter, and copy them into it without the padding
"""


def gradient_of(name, parameter, rank, step):
    if not parameter.requires_grad or name == "unused":
        return None
    if (name == "used_in_step_1" and step > 1) or (name == "used_on_rank_0" and rank > 0):
        return None
    gradient = torch.empty_like(parameter, requires_grad=False)
    if parameter.dtype == torch.float16 and step == 1:
        return gradient.copy_(large_of(rank, parameter.shape))
    generator = torch.Generator().manual_seed(100 * step + 10 * parameter.numel() + rank)
    numbers = 60 * torch.randint(-5, 6, parameter.shape, generator=generator)
    # Multiples of 60: their means over 1 to 5 ranks are exact, also in float16.
    return gradient.copy_(numbers + 120 * rank)


def bytes_of_state(optimizers):
    """Return how many bytes optimizers keep, without the counts of steps, which have no axis."""
    nbytes = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                nbytes += value.nbytes if getattr(value, "ndim", 0) > 0 else 0
    return nbytes


def run(sharded_optimizer, rank, world_size, make, make_optimizer):
    model = seeded(make)
    made = []

    def make_and_note(tensors):
        made.append(make_optimizer(tensors))
        return made[-1]

    optimizer = sharded_optimizer(model, make_and_note)
    for step in STEPS:
        for name, parameter in model.named_parameters():
            parameter.grad = gradient_of(name, parameter, rank, step)
        optimizer.step()
    allowed = allowed_state(world_size, make, make_optimizer)
    # Less is right, too.
    return {**model.state_dict(), STATE: max(bytes_of_state(made), allowed)}


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def bytes_of_shards(make, world_size):
    """Return the bytes of one shard of each trained parameter, with padding."""
    return sum(-(-each.numel() // world_size) * each.itemsize for each in trained(make()))


def allowed_state(world_size, make, make_optimizer):
    return MOMENTS[make_optimizer.func] * bytes_of_shards(make, world_size)


def start(rank, world_size, make, make_optimizer):
    return {**seeded(make).state_dict(), STATE: allowed_state(world_size, make, make_optimizer)}


def expected(rank, world_size, make, make_optimizer):
    model = seeded(make)
    optimizer = make_optimizer(trained(model))
    for step in STEPS:
        for name, parameter in model.named_parameters():
            everyone = [gradient_of(name, parameter, each, step) for each in range(world_size)]
            parameter.grad = mean_of(everyone)
        optimizer.step()
    return {**model.state_dict(), STATE: allowed_state(world_size, make, make_optimizer)}


def limits(rank, world_size, make, make_optimizer):
    parameters = list(seeded(make).parameters())
    flat = world_size * bytes_of_shards(make, world_size)
    used = sent_bytes("all_reduce", SLACK * len(parameters), world_size)
    # An all_reduce sends what a reduce_scatter and an all_gather send together.
    return {"bytes": len(STEPS) * (sent_bytes("all_reduce", flat, world_size) + used)}


class ShardedOptimizer:
    """Why: each rank updates its shard of every parameter; an all_gather brings the others."""

    def __init__(self, model, make_optimizer):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.shards = []
        for parameter in self.parameters:
            chunks = padded(parameter).chunk(dist.get_world_size())
            self.shards.append(chunks[dist.get_rank()].clone())
        self.optimizer = make_optimizer(self.shards)

    def step(self):
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


WORDS = {
    "CRASH.*NoneType": "A gradient is None if the parameter is frozen, or if forward() did not "
    "use it.",
    "CRASH.*(outputShape|SIGABRT)": "All shards must have the same length. padded(tensor) sees to"
    " that.",
    "small parameters.*\\binf\\b": "The sum is too large for float16. Divide before the gradients "
    "are added up.",
    "optimizer's state:": "A rank may keep the state of its own shards only. Make the optimizer "
    "with this rank's shard of each trained parameter, and of a tied one once.",
}
MEAN = "padded(gradient) / dist.get_world_size()"
REDUCE = f"dist.reduce_scatter_tensor(shard.grad, {MEAN})"
MINE = "chunk(dist.get_world_size())[dist.get_rank()]"
MISTAKES = {
    "2 times what is expected, with 2 ranks, like all": (MEAN, "padded(gradient)"),
    "Only `used_on_rank_0` is wrong.": (MEAN, "padded(gradient) / count"),
    "WRONG with 2 ranks, SGD, two layers": (REDUCE, f"shard.grad = padded(gradient).{MINE}"),
    "SGD, missing gradients": ("if count > 0:", "if True:"),
    "It differs only at [2:], and is unchanged there.": (
        *("dist.all_gather_into_tensor(whole, shard)", f"whole.{MINE}.copy_(shard)"),
    ),
    "COSTLY with 2 ranks, AdamW": (
        *(REDUCE, f"mean = {MEAN}; dist.all_reduce(mean); shard.grad = mean.{MINE}"),
    ),
}
