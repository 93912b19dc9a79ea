"""How fault_averaged_experts is checked."""

import torch
import torch.distributed as dist
from judging.checks.expert_dispatch import Exchange
from judging.single import named, step
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 2 ranks, an expert on each rank ... Only `expert 0` is wrong."
CASES = {
    "an expert on each rank": {"here": 1, "steps": 1},
    "2 experts on each rank": {"here": 2, "steps": 3},
}
WIDTH = 3
STARTS = True
HINTS = """
Average the gradients of a layer over the ranks: which parameters meet in one all_reduce? Look at
model.shared, and then at model.experts.

An expert is on one rank only, and backward() has already added up its gradient over the tokens of
all ranks. But each rank's loss is a mean over its own tokens, and not over those of all ranks.

for name, parameter in model.named_parameters():
    add up its gradient over the ranks, unless it belongs to an expert
    divide it by the number of ranks in any case
"""


class Mixture(torch.nn.Module):
    """A layer of which each rank has a replica, and experts, of which it has some or all.

    Args:
        numbers: of the experts that this model has.
    """

    def __init__(self, numbers):
        super().__init__()
        torch.manual_seed(1)
        self.shared = torch.nn.Linear(WIDTH, WIDTH)
        experts = []
        for number in numbers:
            torch.manual_seed(100 + number)
            experts.append(torch.nn.Linear(WIDTH, WIDTH))
        self.experts = torch.nn.ModuleList(experts)

    def compute(self, rows, counts):
        """Let each expert compute some of the rows, which are sorted by expert."""
        parts = rows.split(counts)
        pairs = zip(self.experts, parts, strict=True)
        return torch.cat([expert(part) for expert, part in pairs])


class Distributed(Mixture):
    """The same with the experts of this rank. Tokens travel.

    The first tokens of each rank go to expert 0, the next ones to expert 1, and so on. All ranks
    send as many tokens to an expert, so no counts have to travel.
    """

    def __init__(self, rank, here):
        super().__init__(range(rank * here, (rank + 1) * here))

    def forward(self, tokens):
        rank = dist.get_rank()
        world_size = dist.get_world_size()
        here = len(self.experts)
        counts = counts_of(world_size * here)
        own = counts[rank * here : (rank + 1) * here]  # from each rank
        sent = [sum(counts[each * here : each * here + here]) for each in range(world_size)]
        received = [sum(own)] * world_size
        arrived = Exchange.apply(torch.tanh(self.shared(tokens)), sent, received)
        computed = [self.compute(part, own) for part in arrived.split(received)]
        return Exchange.apply(torch.cat(computed), received, sent)


def counts_of(experts):
    """Return how many tokens of a rank go to each expert: 1, 2, 3, and again 1, 2, 3."""
    return [1 + number % 3 for number in range(experts)]


def part(rank, experts):
    """Return the tokens of a rank, and what they should become."""
    generator = torch.Generator().manual_seed(rank)
    tokens, goals = torch.randn(2, sum(counts_of(experts)), WIDTH, generator=generator)
    return tokens, goals


def run(train, rank, world_size, here, steps):
    model = Distributed(rank, here)
    train(model, *part(rank, world_size * here), steps)
    return own_names(model, rank, here)


def own_names(model, rank, here):
    """Return the parameters of a rank, by name. Experts have their numbers over all ranks."""
    found = {}
    for name, parameter in named(model).items():
        if name.startswith("experts."):
            _, number, last = name.split(".")
            name = f"expert {rank * here + int(number)}, {last}"
        found[name] = parameter
    return found


def expected(rank, world_size, here, steps):
    experts = world_size * here
    model = Mixture(range(experts))
    for _ in range(steps):
        losses = []
        for tokens, goals in [part(each, experts) for each in range(world_size)]:
            outputs = model.compute(torch.tanh(model.shared(tokens)), counts_of(experts))
            losses.append(F.mse_loss(outputs, goals))
        step(model, torch.stack(losses).mean())
    model.experts = model.experts[rank * here : (rank + 1) * here]
    return own_names(model, rank, here)


REPAIR = (
    "model.parameters():\n            dist",
    "model.shared.parameters():\n            dist",
    "            parameter.grad /=",
    "        for parameter in model.parameters():\n            parameter.grad /=",
)
WHY = "an expert has the sum of the gradients already. It only has to become a mean."
DIVIDE = "for parameter in model.parameters():\n            parameter.grad /="
MISTAKES = {
    "Only `expert 0` is wrong.": (DIVIDE, DIVIDE.replace("model", "model.shared")),
    "changes by 2 times": (DIVIDE, DIVIDE.replace("model", "model.experts")),
    "The mean over the ranks is": (
        *(DIVIDE, DIVIDE.replace("model", "model.experts")),
        *("dist.all_reduce(parameter.grad)", "pass"),
    ),
}
