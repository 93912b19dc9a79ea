"""How fault_many_times_the_gradient is checked."""

import torch
import torch.distributed as dist
from torch.nn import functional as F
from verdicts import difference

NAME = "train"
FAULT = "WRONG with 2 ranks, 1 step ... Both layers move 2 times as far as they should"
CASES = {
    "1 step": {"each": 3, "steps": 1},
    "different numbers of tokens, 3 steps": {"each": 2, "more": 3, "steps": 3},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}


def make_layers():
    """Return both layers, the same on all ranks."""
    torch.manual_seed(1)
    return torch.nn.Linear(4, 3), torch.nn.Linear(3, 2)


def sizes(world_size, each, more=0):
    """Return how many tokens each rank has. The last one has some more."""
    return [each] * (world_size - 1) + [each + more]


def data(world_size, each, more=0):
    """Return the tokens of all ranks, a list, and the labels."""
    generator = torch.Generator().manual_seed(2)
    tokens = []
    for size in sizes(world_size, each, more):
        tokens.append(torch.randn(5, size, 4, generator=generator))
    return tokens, torch.tensor([0, 1, 1, 0, 1])


def run(train, each, steps, more=0):
    """Call the learner's function on this rank."""
    layer, head = make_layers()
    tokens, labels = data(dist.get_world_size(), each, more)
    count = sum(part.shape[1] for part in tokens)
    train(layer, head, tokens[dist.get_rank()], labels, count, steps)
    return state(layer, head)


def state(layer, head):
    """Return the parameters of both layers by name."""
    found = {}
    for name, module in (("layer", layer), ("head", head)):
        for kind, parameter in module.named_parameters():
            found[f"{name}.{kind}"] = parameter.detach()
    return found


def trained(world_size, case, of_layer=1.0, of_head=1.0, only=None):
    """Return the parameters after training in a single process.

    Args:
        world_size: how many ranks' tokens there are.
        case: the arguments of run().
        of_layer, of_head: factors of the layers' gradients.
        only: the rank whose tokens alone give `layer` a gradient; None: all.
    """
    layer, head = make_layers()
    tokens, labels = data(world_size, case["each"], case.get("more", 0))
    count = sum(part.shape[1] for part in tokens)
    for _ in range(case["steps"]):
        layer.zero_grad()
        head.zero_grad()
        total = 0
        for rank, part in enumerate(tokens):
            term = layer(part).tanh().sum(dim=1)
            if only not in (None, rank):
                term = term.detach()
            total = total + term
        F.cross_entropy(head(total / count), labels).backward()
        with torch.no_grad():
            for module, factor in ((layer, of_layer), (head, of_head)):
                for parameter in module.parameters():
                    parameter -= 0.1 * factor * parameter.grad
    return state(layer, head)


def expected(rank, world_size, **case):
    """Return what run() should return."""
    return trained(world_size, case)


def explain(outcome):
    """Put typical mistakes into words."""
    if outcome.verdict != "WRONG" or outcome.world_size == 1:
        return None
    n = outcome.world_size
    rank = outcome.rank
    guesses = {
        f"Both layers move {n} times as far as they should. How many ranks compute the loss?": {
            "of_layer": n,
            "of_head": n,
        },
        f"Both layers move {n * n} times as far as they should.": {
            "of_layer": n * n,
            "of_head": n * n,
        },
        f"Both layers move 1/{n} as far as they should: divided by {n} twice.": {
            "of_layer": 1 / n,
            "of_head": 1 / n,
        },
        f"`layer` is right, and `head` moves {n} times as far as it should. Each rank has the whole"
        " gradient of `head` already.": {"of_head": n},
        f"`head` is right, and `layer` moves 1/{n} as far as it should. Its gradient on a rank is a"
        " part, so the parts are added up and not averaged.": {"of_layer": 1 / n},
        f"`head` is right, and `layer` moves {n} times as far as it should.": {"of_layer": n},
        "`head` is right, and `layer` has the gradient of this rank's tokens only.": {"only": rank},
        f"`head` is right, and `layer` has {n} times the gradient of this rank's tokens only.": {
            "of_layer": n,
            "only": rank,
        },
    }
    actual = outcome.results[rank]
    for words, factors in guesses.items():
        if not difference(actual, trained(n, outcome.case, **factors), TOLERANCE):
            return words
    return None


def explain_crash(crash):
    """Put typical errors into words."""
    if "NoneType" in crash.error:
        return "A rank that does not call backward() has no gradients: its grad is None."
    return None
