"""How fault_mixed_gradients is checked."""

import itertools

import torch
import torch.distributed as dist
from judging.words import difference
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 2 ranks, two layers of the same size ... changes by rank 1's gradient of"
CASES = {
    "two layers of the same size": {"kind": "square", "steps": 1},
    "frozen, tied and unused parameters": {"kind": "special", "steps": 3},
}
LR = 0.01
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
    """Return a small model, the same one on all ranks."""
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


def run(train, kind, steps):
    """Call the learner's function on this rank."""
    model = make_model(kind)
    train(model, *part(dist.get_rank()), steps)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def gradients(model, ranks):
    """Return the gradient of each parameter, by name, for all images of some ranks together."""
    parts = [part(rank) for rank in ranks]
    images = torch.cat([images for images, _ in parts])
    labels = torch.cat([labels for _, labels in parts])
    model.zero_grad()
    F.mse_loss(model(images), labels).backward()
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
    return found


def expected(rank, world_size, kind, steps):
    """Return what run() should return."""
    model = make_model(kind)
    for _ in range(steps):
        found = gradients(model, range(world_size))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in found:
                    parameter -= LR * found[name]
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(model, images, labels, steps):
    """Why: numel() is the same on all ranks, so all ranks send the gradients in the same order."""
    for _ in range(steps):
        model.zero_grad()
        F.mse_loss(model(images), labels).backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        # The gradients with the most numbers travel first.
        trained.sort(key=lambda parameter: parameter.numel(), reverse=True)
        for parameter in trained:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        with torch.no_grad():
            for parameter in trained:
                parameter -= 0.01 * parameter.grad


WORDS = {
    "CRASH.*NoneType": "A parameter that is frozen or not used has no gradient: its grad is None."
}


def explain(trial):
    """Put typical mistakes into words."""
    if trial.verdict == "HANG" or trial.case["kind"] != "square":
        return None
    size = trial.world_size
    model = make_model("square")
    own = [gradients(model, [rank]) for rank in range(size)]
    kinds = [call.kind for call in trial.messages[trial.rank]]
    for name, parameter in model.named_parameters():
        now = trial.results[trial.rank][name]
        change = (parameter.detach() - now) / LR
        found = words_on(name, change, own, trial.rank)
        if found and "barrier" in kinds:
            return f"{found} A barrier does not change which calls meet."
        if found and len(kinds) == 1 and "gradient of" in found:
            return f"{found} In which order are the gradients in the message?"
        if found:
            return found
    return None


def words_on(name, change, own, mine):
    """Return in words which gradients have changed a parameter; None if they are right or unknown.

    Args:
        name: the parameter.
        change: by what it has changed, as if it were a gradient.
        own: for each rank, the gradients of its images by name.
        mine: the rank on which it has changed.
    """
    size = len(own)
    other = "1.weight" if name == "0.weight" else "0.weight"
    right = sum(gradients[name] for gradients in own)
    if close(change, right / size):
        return None
    if close(change, right):
        return f"{name} changes by the sum of the ranks' gradients, and not by their mean."
    if close(change, own[mine][name]):
        return f"{name} changes by this rank's own gradient only."
    for mixed in itertools.product([False, True], repeat=size):
        total = 0
        for gradients_of_rank, swapped in zip(own, mixed, strict=True):
            total = total + gradients_of_rank[other if swapped else name]
        if close(change, total / size):
            rank = mixed.index(True)
            return f"{name} changes by rank {rank}'s gradient of {other}."
    return None


def close(tensor, other):
    """Return whether two gradients are equal, up to rounding."""
    return difference(tensor, other, {"rtol": 1e-3, "atol": 1e-3}) is None


LARGEST = ("parameter.numel()", "parameter.grad.norm()")
MISTAKES = {
    "changes by rank 1's gradient of": LARGEST,
    "A barrier does not change which calls meet.": (
        *LARGEST,
        *("dist.all_reduce(parameter.grad)", "dist.barrier(); dist.all_reduce(parameter.grad)"),
    ),
    "changes by the sum of the ranks' gradients, and not": (
        "parameter.grad /= dist.get_world_size()",
        "pass",
    ),
    "changes by this rank's own gradient only.": (
        *(
            "in trained:\n            dist.all_reduce",
            "in trained[:1]:\n            dist.all_reduce",
        ),
    ),
    WORDS["CRASH.*NoneType"]: (
        *(
            "[parameter for parameter in model.parameters() if parameter.grad is not None]",
            "list(model.parameters())",
        ),
    ),
}
