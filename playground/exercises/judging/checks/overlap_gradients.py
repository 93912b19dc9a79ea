"""How overlap_gradients is checked."""

import time
from pathlib import Path

import torch
import torch.distributed as dist
from judging.attempt import Rung
from judging.traffic import Counting, sent_bytes
from judging.words import difference
from torch import nn


class Plain(nn.Module):
    """Three layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 4)
        self.third = nn.Linear(4, 2)

    def forward(self, rank, at_first):
        """Return the output of a rank. backward() calls at_first() before the first layer."""
        hidden = self.first(torch.randn(2, 3))
        hidden.register_hook(at_first)
        return self.third(self.second(hidden).tanh())


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
        """Return the output of a rank. backward() calls at_first() before the first layer."""
        hidden = self.embedding(torch.randint(7, (4,)))
        hidden.register_hook(at_first)
        return self.output(self.norm(self.frozen(hidden)) * self.scale)


class Dtypes(nn.Module):
    """Layers of three dtypes."""

    def __init__(self):
        super().__init__()
        self.first_float16 = nn.Linear(3, 4).half()
        self.second_float32 = nn.Linear(4, 4)
        self.third_float64 = nn.Linear(4, 2).double()

    def forward(self, rank, at_first):
        """Return the output of a rank. backward() calls at_first() before the first layer."""
        hidden = self.first_float16(torch.randn(2, 3).half())
        hidden.register_hook(at_first)
        second = self.second_float32(hidden.float())
        return self.third_float64(second.double())


class Orders(nn.Module):
    """Ranks with an odd number run the two middle layers in the other order."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)

    def forward(self, rank, at_first):
        """Return the output of a rank. backward() calls at_first() before the first layer."""
        hidden = self.first(torch.randn(2, 3))
        hidden.register_hook(at_first)
        if rank % 2:
            return self.left(self.right(hidden).tanh())
        return self.right(self.left(hidden).tanh())


class Branches(nn.Module):
    """Even ranks run a layer more, and no rank runs the last one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.on_even_ranks = nn.Linear(4, 4)
        self.unused = nn.Linear(2, 2)

    def forward(self, rank, at_first):
        """Return the output of a rank. backward() calls at_first() before the first layer."""
        hidden = self.first(torch.randn(2, 3))
        hidden.register_hook(at_first)
        return hidden if rank % 2 else self.on_even_ranks(hidden)


CASES = {
    "three layers": {"model_class": Plain},
    "tied and frozen parameters": {"model_class": TiedAndFrozen},
    "three dtypes": {"model_class": Dtypes},
    "a different order on odd ranks": {"model_class": Orders},
    "missing gradients": {"model_class": Branches},
}
RUNG_1 = Rung(
    cases=("three layers",),
    words="for the lesson's own model",
    then="any model, such as one with a frozen parameter, or with layers in another order.",
)
TOLERANCE = {"rtol": 2e-3, "atol": 1e-5}  # float16 has 3 digits
STEPS = (1, 2)
SLACK = 8  # bytes that each parameter may cost in addition
SECONDS_TO_WAIT = 5
EARLY = "numbers that travel when backward() comes to the first layer"
WAITED = "backward() of the other ranks"
NO_HOOK_WAITS = "no hook waits for a message"
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


def needed_early(model_class):
    """Return how many numbers must travel when backward() comes to the first layer."""
    if model_class is Branches:  # a message for a layer that no rank uses may be the first one
        return 0
    model = model_of(model_class)
    first_layer = next(model.children())
    others = set(model.parameters()) - set(first_layer.parameters())
    return sum(parameter.numel() for parameter in others if parameter.requires_grad)


def model_of(model_class):
    """Return the model."""
    torch.manual_seed(0)
    return model_class()


def run(overlap_gradients, model_class):
    """Call the learner's function on this rank, and run two steps."""
    rank = dist.get_rank()
    model = model_of(model_class)
    finish = overlap_gradients(model)
    result = {}
    for step in STEPS:
        model.zero_grad()
        if rank == 0 and step == 1:
            waited = wait_for_others()
            result[WAITED] = "a hook waits for a message" if waited else NO_HOOK_WAITS
        early = backward(model, rank, step)
        Path(f"rank{rank}").touch()
        finish()
        result |= gradients_of(model, step)
        # More is right, too: a message may also have flags.
        result[f"step {step}: {EARLY}"] = min(early, needed_early(model_class))
    return result


def wait_for_others():
    """Wait until all other ranks have run backward(). Returns whether one of them waits too long.

    Rank 0 has not started its own messages. So if backward() of another rank waits for a message,
    it waits until this function returns.
    """
    end = time.monotonic() + SECONDS_TO_WAIT
    missing = [Path(f"rank{rank}") for rank in range(1, dist.get_world_size())]
    while not all(path.exists() for path in missing):
        if time.monotonic() > end:
            return True
        time.sleep(0.002)
    return False


def gradients_of(model, step):
    """Return what is compared."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[f"step {step}: the gradient of {name}"] = parameter.grad
    return gradients


def all_gradients(world_size, model_class, step):
    """Return the gradients of each parameter on all ranks, a dict of lists."""
    gradients = {}
    for rank in range(world_size):
        model = model_of(model_class)
        backward(model, rank, step)
        for name, gradient in gradients_of(model, step).items():
            gradients.setdefault(name, []).append(gradient)
    return gradients


def expected(rank, world_size, model_class):
    """Return what run() should return."""
    result = {}
    for step in STEPS:
        for name, gradients in all_gradients(world_size, model_class, step).items():
            existing = [gradient for gradient in gradients if gradient is not None]
            mean = None
            if existing:
                total = sum(gradient.double() for gradient in existing)
                mean = (total / world_size).to(existing[0].dtype)
            result[name] = mean
        result[f"step {step}: {EARLY}"] = needed_early(model_class)
    if rank == 0:
        result[WAITED] = NO_HOOK_WAITS
    return result


def limits(rank, world_size, model_class):
    """Return how much a rank may send in all steps."""
    parameters = list(model_of(model_class).parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    nbytes = sum(parameter.nbytes for parameter in trained) + SLACK * len(parameters)
    return {
        "messages": len(STEPS) * (len(trained) + 1),
        "bytes": len(STEPS) * sent_bytes("all_reduce", nbytes, world_size),
    }


def message_of(parameter):
    """Return the gradient divided by n, as a tensor with one axis, and a flag at its end.

    A missing gradient counts as zero. The flag is above 0 if this rank has a gradient. When such
    messages are added up over n ranks, the sum has the mean gradient. Its last number is above 0 if
    any rank has a gradient.
    """
    missing = parameter.grad is None
    gradient = torch.zeros_like(parameter) if missing else parameter.grad
    flag = gradient.new_tensor([0.0 if missing else 1.0])
    return torch.cat([gradient.detach().flatten(), flag]) / dist.get_world_size()


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


WORDS = {
    "CRASH.*doesn't require gradient": "backward() computes no gradient for a frozen parameter, "
    "so it can have no hook.",
    "CRASH.*object is not callable": "overlap_gradients(model) must return the function finish.",
    "CRASH.*its buffer has": "All ranks must start the same messages in the same order. Is a "
    "gradient missing?",
    "CRASH.*assign.*grad": "All numbers of a message have the same dtype.",
}


def explain(trial):
    """Put typical mistakes into words."""
    model_class = trial.case["model_class"]
    if trial.verdict == "HANG":
        if model_class is Branches:
            return "All ranks must send the same messages, even those that lack a gradient."
        return None
    if trial.verdict == "COSTLY":
        return None
    actual, right = trial.of_rank()
    wrong = [name for name in right if difference(actual[name], right[name], TOLERANCE)]
    if EARLY in wrong[0] and actual[wrong[0]] > 0:
        return "The means are right, but only some start in time. Does each one have a hook?"
    if EARLY in wrong[0]:
        return "The means are right, but no message starts in time. Start each one in a hook."
    if WAITED in wrong[0]:
        return "The means are right, but a hook waits. Start messages with async_op=True."
    step = 2 if wrong[0].startswith("step 2") else 1
    own = all_gradients(trial.world_size, model_class, step)[wrong[0]][trial.rank]
    found = actual[wrong[0]]
    if own is not None and not difference(found, own / trial.world_size, TOLERANCE):
        return "Gradients of other ranks are still missing. Does finish() wait for each message?"
    if step == 2:
        return "Step 1 is right. What has finish() left behind, or not waited for?"
    if right[wrong[0]] is None:
        return "No rank has this gradient, so it stays None: the optimizer must skip it."
    if found is None:
        return "Another rank has this gradient, so all ranks get the mean."
    if not difference(found, own, TOLERANCE):
        return "This is the rank's own gradient. Is the mean copied into parameter.grad?"
    if model_class is Orders:
        return "Are gradients of different parameters added up? Fix one order for all ranks."
    return None


START = "        started.append((message, dist.all_reduce(message, async_op=True)))\n"
MISTAKES = {
    "but a hook waits.": (START, f"{START}        started[-1][1].wait()\n"),
    "but no message starts in time.": (
        *("parameter.register_post_accumulate_grad_hook(on_gradient)", "pass"),
    ),
    WORDS["CRASH.*doesn't require gradient"]: (" if each.requires_grad]", "]"),
    "No rank has this gradient, so it stays None": ("if message[-1] > 0:", "if True:"),
    "Step 1 is right. What has finish() left behind": ("        started.clear()\n", ""),
}
