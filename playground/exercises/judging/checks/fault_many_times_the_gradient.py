"""How fault_many_times_the_gradient is checked."""

import torch
from judging.single import named, step
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 2 ranks, 1 step ... It changes by 2 times what is expected, with 2 ranks"
CASES = {
    "1 step": {"each": 3, "steps": 1},
    "different numbers of tokens, 3 steps": {"each": 2, "more": 3, "steps": 3},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
STARTS = True
HINTS = """
After the all_reduce in Add, what do the ranks compute from the sum, and on how many of them? Of
which loss is the sum of all ranks' gradients the gradient?

Every rank computes the whole loss. Add's backward() adds up the gradients of all these losses, and
dist.all_reduce(parameter.grad) adds up what each of them gives to a parameter. So let all losses
together be one loss.

the loss of each rank = the loss / the number of ranks
(Or only one rank counts: the others multiply the loss by 0, as in the lesson. Or divide gradients.)
"""


def make_model():
    torch.manual_seed(1)
    return torch.nn.ModuleDict({"layer": torch.nn.Linear(4, 3), "head": torch.nn.Linear(3, 2)})


def data(world_size, each, more=0):
    """Return the tokens of all ranks, a list, and the labels. The last rank has some more."""
    generator = torch.Generator().manual_seed(2)
    tokens = []
    for size in [each] * (world_size - 1) + [each + more]:
        tokens.append(torch.randn(5, size, 4, generator=generator))
    return tokens, torch.tensor([0, 1, 1, 0, 1])


def run(train, rank, world_size, each, steps, more=0):
    model = make_model()
    tokens, labels = data(world_size, each, more)
    count = sum(part.shape[1] for part in tokens)
    train(model["layer"], model["head"], tokens[rank], labels, count, steps)
    return named(model)


def expected(rank, world_size, each, steps, more=0):
    model = make_model()
    tokens, labels = data(world_size, each, more)
    count = sum(part.shape[1] for part in tokens)
    for _ in range(steps):
        total = sum(model["layer"](part).tanh().sum(dim=1) for part in tokens)
        step(model, F.cross_entropy(model["head"](total / count), labels))
    return named(model)


REPAIR = (
    "        loss.backward()",
    "        loss = loss / dist.get_world_size()  # the losses of all ranks are then one loss\n"
    "        loss.backward()",
)
WHY = "all ranks compute the same loss. The sum over the ranks is the gradient of n losses."
NO_GRADIENT = "A rank that does not call backward() has no gradients: its grad is None."
WORDS = {"CRASH.*NoneType": NO_GRADIENT}
LOSS = "loss = loss / dist.get_world_size()"
REDUCE = "dist.all_reduce(parameter.grad)"
OF_LAYER = "len(parameter) != 3"
MISTAKES = {
    "This is right: `head.weight`": (LOSS, "pass", REDUCE, f"{OF_LAYER} or {REDUCE}"),
    "The mean over the ranks is": (LOSS, "pass", REDUCE, "pass"),
    NO_GRADIENT: ("loss.backward()", "dist.get_rank() == 0 and loss.backward()"),
}
