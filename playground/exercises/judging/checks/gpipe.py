"""How gpipe is checked."""

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes  # backward(gradient) imports it: see ranks.py
from torch import nn
from torch.nn import functional as F
from verdicts import Rung, difference

CASES = {
    "2, 2 and 2 rows": {"rows": (2, 2, 2)},
    "3, 3 and 1 rows": {"rows": (3, 3, 1)},
    "the first 3 layers are frozen": {"rows": (2, 2, 2, 1), "frozen": (0, 1, 2)},
    "layer 3 is frozen": {"rows": (2, 1), "frozen": (3,)},
    "integers as inputs, float64": {"rows": (2, 2, 1), "words": True},
    "1 micro-batch, earlier gradients": {"rows": (3,), "before": True},
}
RUNG_1 = Rung(
    cases=("2, 2 and 2 rows",),
    words="for micro-batches of the same size",
    then="any sizes and any stage, with all forward passes first.",
)
ONLY = ("send", "recv")
INSTEAD = "use send and recv"
PASSES = "its forward passes"
CLASSES = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Twice(nn.Module):
    """Uses the same layer twice."""

    def __init__(self, width):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, inputs):
        """Apply the layer, tanh, and the layer again."""
        return self.layer(torch.tanh(self.layer(inputs)))


class Swap(nn.Module):
    """Swaps two axes, so its output is not contiguous."""

    def forward(self, inputs):
        """Return a view."""
        return inputs.transpose(1, 2)


class Double(nn.Module):
    """Continues in float64."""

    def forward(self, inputs):
        """Return the same numbers in float64."""
        return inputs.double()


def layers_of(words, frozen, before):
    """Return a model as a list of 5 layers. Each rank makes the same one.

    Args:
        words: whether it takes integers and computes in float64.
        frozen: the numbers of the layers that are not trained.
        before: whether the parameters have gradients already.
    """
    torch.manual_seed(0)
    if words:
        layers = [
            nn.Sequential(nn.Embedding(9, 4), Swap()),
            nn.Sequential(nn.Linear(2, 3), Swap(), Double()),
            nn.Sequential(nn.Linear(4, 5).double(), Swap()),
            nn.Sequential(nn.Flatten(), nn.Linear(15, 4).double(), nn.Tanh()),
            nn.Linear(4, CLASSES).double(),
        ]
    else:
        layers = [
            nn.Sequential(nn.Linear(4, 6), nn.Tanh()),
            nn.Sequential(nn.Linear(6, 5), nn.Tanh()),
            Twice(5),
            nn.Sequential(nn.Linear(5, 7), nn.Tanh()),
            nn.Linear(7, CLASSES),
        ]
    for number in frozen:
        layers[number].requires_grad_(False)
    for parameter in nn.Sequential(*layers).parameters():
        parameter.grad = torch.ones_like(parameter) if before else None
    return layers


def data_of(rows, words):
    """Return the micro-batches and their labels, two lists."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(sum(rows), 4, generator=generator)
    if words:
        inputs = torch.randint(9, (sum(rows), 2), generator=generator)
    labels = torch.randint(CLASSES, (sum(rows),), generator=generator)
    return list(inputs.split(rows)), list(labels.split(rows))


def numbers_of(rank, world_size):
    """Return the numbers of the layers that are the stage of a rank."""
    return torch.arange(5).tensor_split(world_size)[rank].tolist()


def activations(layers, inputs):
    """Return what goes into each layer of the model, and what comes out of the last one."""
    found = [inputs]
    with torch.no_grad():
        for layer in layers:
            found.append(layer(found[-1]))
    return found


def run(gpipe, rows, words=False, frozen=(), before=False):
    """Call the learner's function on this rank. Returns the gradients of its stage."""
    layers = layers_of(words, frozen, before)
    mine = numbers_of(dist.get_rank(), dist.get_world_size())
    inputs, labels = data_of(rows, words)
    example = activations(layers, inputs[0])[mine[0]]
    stage = nn.Sequential(*[layers[number] for number in mine])
    passes = []
    stage[0].register_forward_hook(lambda *_: passes.append(1))
    gpipe(stage, inputs, labels, example.shape[1:], example.dtype)
    return gradients(layers, mine) | {PASSES: len(passes)}


def gradients(layers, numbers):
    """Return the gradients of some layers by name."""
    found = {}
    for number in numbers:
        for name, parameter in layers[number].named_parameters():
            found[f"the gradient of layer {number}'s {name}"] = parameter.grad
    return found


def expected(rank, world_size, rows, **case):
    """Return the gradients of a single process, and how many forward passes a rank computes."""
    weights = [1 / sum(rows)] * len(rows)
    found = weighted(weights, numbers_of(rank, world_size), rows, **case)
    return found | {PASSES: len(rows)}


def weighted(weights, numbers, rows, words=False, frozen=(), before=False):
    """Return gradients of a sum over the micro-batches: a weight times the sum of its losses."""
    layers = layers_of(words, frozen, before)
    model = nn.Sequential(*layers)
    inputs, labels = data_of(rows, words)
    for weight, images, targets in zip(weights, inputs, labels, strict=True):
        loss = weight * F.cross_entropy(model(images), targets, reduction="sum")
        if loss.requires_grad:
            loss.backward()
    return gradients(layers, numbers)


def limits(rank, world_size, rows, words=False, frozen=(), before=False):
    """Return how much a rank may send, and in how many rounds."""
    numbers = numbers_of(rank, world_size)
    inputs, _ = data_of(rows, words)
    found = activations(layers_of(words, frozen, before), torch.cat(inputs))
    # A rank sends its outputs to the next rank, and the gradients of its inputs to the previous.
    sends = []
    if rank < world_size - 1:
        sends.append(found[numbers[-1] + 1].nbytes)
    if rank > 0:
        sends.append(found[numbers[0]].nbytes)
    rounds = 2 * (world_size + len(rows) - 2) if world_size > 1 else 0
    return {"messages": len(sends) * len(rows), "bytes": sum(sends), "rounds": rounds}


def explain(outcome):
    """Put typical mistakes into words."""
    rows = outcome.case["rows"]
    size = outcome.world_size
    if outcome.verdict == "COSTLY":
        sent = [each for each in outcome.messages[outcome.rank] if each.kind == "send"]
        allowed = limits(outcome.rank, size, **outcome.case)
        if sum(each.nbytes for each in sent) > allowed["bytes"]:
            return "Only the stage's output goes forward, and only the gradient of its input back."
        if sent and size > 2:
            return (
                "Does a rank wait for the gradient of a micro-batch before it computes the next "
                "one? Compute all forward passes first."
            )
        return None
    if outcome.verdict == "HANG":
        return None
    actual, right = map(dict, outcome.of_rank())
    passes = actual.pop(PASSES)
    del right[PASSES]
    for name in right:
        if right[name] is not None and actual[name] is None:
            return "There is no gradient. Was backward() called on this rank?"
        if right[name] is None and actual[name] is not None:
            return "A frozen parameter has got a gradient."
    count = len(rows)
    if passes > count and not difference(actual, right, CLOSE):
        return "One forward pass for each micro-batch is enough: keep its output for backward()."
    if outcome.case.get("before"):
        gone = weighted([1 / sum(rows)], numbers_of(outcome.rank, size), rows)
        if not difference(actual, gone, CLOSE):
            return "The earlier gradients are gone. backward() adds to what is in parameter.grad."
    nothing = [0] * (count - 1)
    share = 1 / sum(rows)
    smaller = "The last micro-batch has fewer rows, so it must count less."
    means = [1 / number for number in rows]
    found = {
        "These are the gradients of the sum of the micro-batches' mean losses. "
        "The loss is the mean over all rows.": means,
        f"These are the gradients of the mean of the micro-batches' mean losses. {smaller}": [
            mean / count for mean in means
        ],
        "These are the gradients of the sum over all rows, not of the mean.": [1] * count,
        "Only the last micro-batch is in the gradients. backward() adds to parameter.grad, so "
        "leave it as it is in between.": [*nothing, share],
        "Only the first micro-batch is in the gradients.": [share, *nothing],
    }
    numbers = numbers_of(outcome.rank, size)
    for words, weights in found.items():
        if not difference(actual, weighted(weights, numbers, **outcome.case), CLOSE):
            return words
    return None


def explain_crash(crash):
    """Put typical errors into words."""
    error = crash.error
    if "only for scalar outputs" in error:
        return (
            "Only the last rank has a loss. On the others, backward(gradient) starts with the "
            "gradient that the next rank has sent."
        )
    if "does not require grad" in error:
        return (
            "If this stage and all before it are frozen, the output requires no gradient, and "
            "backward() has nothing to do."
        )
    if "NoneType" in error or "Expected Tensor, got" in error or "Invalid function arg" in error:
        return "Was requires_grad_() called for what was received? Then backward() fills its .grad."
    if "contiguous" in error:
        return "send needs a contiguous tensor: output.contiguous()."
    if "buffer has" in error:
        return "Has the buffer the shape and the dtype of the message, and its number of rows?"
    if "floating point" in error or "require gradients" in error:
        return "The inputs of rank 0 may be integers. They need no gradient."
    return None
