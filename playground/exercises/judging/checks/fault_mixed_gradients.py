"""How fault_mixed_gradients is checked."""

import torch
from judging.single import named, step, together
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 2 ranks, two layers of the same size ... The ranks should have the same numbers"
CASES = {
    "two layers of the same size": {"kind": "square", "steps": 1},
    "frozen, tied and unused parameters": {"kind": "special", "steps": 3},
}
STARTS = True
HINTS = """
The first all_reduce of a rank meets the first all_reduce of the other ranks, the second one meets
the second one, and so on. Which parameter is the first on each rank?

A collective knows nothing of parameters, only of the order of the calls. So the order must depend
on something that is equal on all ranks, such as model.parameters() or numel().

for parameter in the parameters with a gradient, in an order that is equal on all ranks:
    add up and divide its gradient
"""


class Special(torch.nn.Module):
    """A model with parameters that are frozen, tied or not used, and with a buffer."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)
        self.second.weight = self.first.weight
        self.last = torch.nn.Linear(2, 2)
        self.last.bias.requires_grad_(False)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, images):
        return self.last(self.second(torch.tanh(self.first(images)))) * self.scale


def make_model(kind):
    torch.manual_seed(2)
    if kind == "special":
        return Special()
    first = torch.nn.Linear(2, 2, bias=False)
    second = torch.nn.Linear(2, 2, bias=False)
    # An image along the first axis gives the second layer the larger gradient, an image along the
    # second axis the first layer.
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        second.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
    return torch.nn.Sequential(first, second)


def part(rank):
    """Return the images and the labels of a rank: along the first axis if the rank is even."""
    images = torch.zeros(2, 2)
    images[:, rank % 2] = 1 + rank // 2
    return images, torch.zeros(2, 2)


def run(train, rank, world_size, kind, steps):
    model = make_model(kind)
    train(model, *part(rank), steps)
    return named(model)


def expected(rank, world_size, kind, steps):
    model = make_model(kind)
    images, labels = together([part(each) for each in range(world_size)])
    for _ in range(steps):
        step(model, F.mse_loss(model(images), labels), lr=0.01)
    return named(model)


REPAIR = (
    "The largest gradients travel",
    "The gradients with the most numbers travel",
    "parameter.grad.norm()",
    "parameter.numel()",
)
WHY = "numel() is the same on all ranks, so all ranks send the gradients in the same order."


NO_GRADIENT = "A parameter that is frozen or not used has no gradient: its grad is None."
WORDS = {"CRASH.*NoneType": NO_GRADIENT}
MISTAKES = {
    "changes by 2 times": ("parameter.grad /= dist.get_world_size()", "pass"),
    "The mean over the ranks is": ("dist.all_reduce(parameter.grad)", "continue"),
    NO_GRADIENT: (" if parameter.grad is not None", ""),
}
