"""How overlap_gradients is checked."""

import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from judging.single import gradients_of, mean_of, seeded
from judging.traffic import Counting, sent_bytes
from overlap_gradients import message_of
from torch import nn


class Layers(nn.Module):
    """A layer that all ranks run, and then some of the others, in an order of the rank."""

    def __init__(self, even, odd, dtypes=(torch.float32,) * 3):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)
        self.paths = even, odd

    def forward(self, rank, at_first):
        """Return the output of a rank. backward() calls at_first() before the first layer."""
        hidden = self.first(torch.randn(2, 4).to(self.first.weight.dtype))
        hidden.register_hook(at_first)
        for name in self.paths[rank % 2]:
            layer = getattr(self, name)
            hidden = layer(hidden.to(layer.weight.dtype)).tanh()
        return hidden


class TiedAndFrozen(nn.Module):
    """A tied parameter, frozen parameters, a buffer, and a parameter without an axis."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.ones(()))
        self.output = nn.Linear(5, 7)
        self.output.weight = self.embedding.weight

    def forward(self, rank, at_first):
        hidden = self.embedding(torch.randint(7, (4,)))
        hidden.register_hook(at_first)
        return self.output(self.norm(self.frozen(hidden)) * self.scale)


FORWARD = ("second", "third")
DTYPES = (torch.float16, torch.float32, torch.float64)
CASES = {
    "three layers": {"make": partial(Layers, FORWARD, FORWARD)},
    "tied and frozen parameters": {"make": TiedAndFrozen},
    "three dtypes": {"make": partial(Layers, FORWARD, FORWARD, DTYPES)},
    "a different order on odd ranks": {"make": partial(Layers, FORWARD, FORWARD[::-1])},
    # A message for the third layer, which no rank uses, may be the first one.
    "missing gradients": {"make": partial(Layers, ("second",), ()), "all_travel_early": False},
}
RUNG_1 = "for the lesson's own model"
RUNG_2 = "any model, such as one with a frozen parameter, or with layers in another order."
TOLERANCE = {"rtol": 2e-3, "atol": 2e-4}  # float16 has 3 digits
STEPS = (1, 2)
SLACK = 8  # bytes that each parameter may cost in addition
EARLY = "numbers that travel when backward() comes to the first layer"
HINTS = """
A hook that starts a message must not wait for it. And all ranks must start their messages in the
same order, although a gradient may be ready at different moments, or never.

parameter.register_post_accumulate_grad_hook(hook) lets backward() call hook(parameter) when
parameter.grad is complete. dist.all_reduce(message, async_op=True) starts a message and returns a
request, whose wait() waits for it.

parameters = the trained ones, the last one first
hook: while the next parameter of this list has its gradient, start its message
finish: start the messages that are left; for each message: wait, and if its flag is above 0, keep
    the rest of it as the gradient; forget the messages
"""


def backward(model, rank, step):
    """Run forward() and backward() of a rank.

    Returns how many numbers this rank has started to send when backward() comes to the first layer.
    """
    torch.manual_seed(10 * step + rank)
    messages = []
    early = []
    output = model(rank, lambda _: early.extend(messages))
    with Counting(None, messages.append):
        output.square().sum().backward()
    return sum(message.numel for message in early)


def needed_early(make, all_travel_early=True):
    """Return how many numbers can travel then: those of all layers but the first.

    In the order of the layers, a parameter of the model itself may be the last one.
    """
    first, *others = seeded(make).children()
    parameters = set(nn.ModuleList(others).parameters()) - set(first.parameters())
    early = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return early if all_travel_early else 0


def run(overlap_gradients, rank, world_size, make, **case):
    """Call the learner's function and train two steps.

    In step 1, rank 0 comes to backward() when the others have run theirs. Until then, no message of
    theirs can end.
    """
    others = [Path(f"rank{other}") for other in range(1, world_size)]
    model = seeded(make)
    finish = overlap_gradients(model)
    result = {}
    for step in STEPS:
        model.zero_grad()
        while rank == 0 and not all(other.exists() for other in others):
            time.sleep(0.01)
        early = backward(model, rank, step)
        Path(f"rank{rank}").touch()
        finish()
        result |= gradients_of(model, f"step {step}: ")
        # More is right, too: a message may also have flags.
        result[f"step {step}: {EARLY}"] = min(early, needed_early(make, **case))
    return result


def expected(rank, world_size, make, **case):
    result = {}
    for step in STEPS:
        everyone = []
        for other in range(world_size):
            model = seeded(make)
            backward(model, other, step)
            everyone.append(gradients_of(model, f"step {step}: "))
        for name in everyone[0]:
            result[name] = mean_of([each[name] for each in everyone])
        result[f"step {step}: {EARLY}"] = needed_early(make, **case)
    return result


def limits(rank, world_size, make, **case):
    parameters = list(seeded(make).parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    nbytes = sum(parameter.nbytes for parameter in trained) + SLACK * len(parameters)
    return {
        "messages": len(STEPS) * (len(trained) + 1),
        "bytes": len(STEPS) * sent_bytes("all_reduce", nbytes, world_size),
    }


def overlap_gradients(model):
    """Why: a hook does not wait, and all ranks start their messages in one order."""
    parameters = [each for each in model.parameters() if each.requires_grad][::-1]
    started = []  # a message and its request for each of the first parameters

    def start_next():
        message = message_of(parameters[len(started)])
        started.append((message, dist.all_reduce(message, async_op=True)))

    def on_gradient(_):
        while len(started) < len(parameters) and parameters[len(started)].grad is not None:
            start_next()

    def finish():
        while len(started) < len(parameters):  # for example if a gradient is missing
            start_next()
        for parameter, (message, request) in zip(parameters, started, strict=True):
            request.wait()
            if message[-1] > 0:
                parameter.grad = message[:-1].view_as(parameter)
        started.clear()

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient)
    return finish


HOOKLESS = "CRASH.*doesn't require gradient"
WAITS = r"HANG.*rank 0 waits [^\n]*(outside|exists|sleep)"
WORDS = {
    HOOKLESS: "backward() computes no gradient for a frozen parameter, so it can have no hook.",
    "CRASH.*its buffer has": "All ranks must start the same messages in the same order.",
    WAITS: "Rank 0 runs backward() after the other ranks here, and a hook of theirs waits for it. "
    "Start messages with async_op=True.",
    "HANG, missing": "All ranks must send the same messages, even those that lack a gradient.",
    "first layer: ": "This rank has the right means, but not every message starts in time. Start "
    "each one in a hook.",
    "WRONG, a different order": "Here backward() of odd ranks has another order of layers.",
    "expected +None": "No rank has this gradient, so it stays None: the optimizer must skip it.",
}
START = "        started.append((message, dist.all_reduce(message, async_op=True)))\n"
MISTAKES = {
    WORDS[WAITS]: (START, f"{START}        started[-1][1].wait()\n"),
    "but not every message starts in time.": (
        *("parameter.register_post_accumulate_grad_hook(on_gradient)", "pass"),
    ),
    WORDS[HOOKLESS]: (" if each.requires_grad]", "]"),
    "No rank has this gradient, so it stays None": ("if message[-1] > 0:", "if True:"),
    "step 2: the gradient": ("        started.clear()\n", ""),
}
