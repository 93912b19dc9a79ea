"""How average_gradients is checked."""

import torch
import torch.distributed as dist
from torch import nn
from traffic import sent_bytes
from verdicts import Rung, contributions, difference


class Plain(nn.Module):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)


class TiedAndFrozen(nn.Module):
    """A tied parameter, frozen parameters, buffers, a parameter without an axis, odd layouts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.output = nn.Linear(5, 7)
        self.output.weight = self.embedding.weight
        self.frozen = nn.Linear(9, 9).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.ones(()))
        self.transposed = nn.Parameter(torch.ones(3, 2).t())


class Unused(nn.Module):
    """Parameters that have no gradient on some ranks, or on all."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(2, 2)
        self.used_on_rank_0 = nn.Parameter(torch.ones(3))
        self.used_on_the_last_rank = nn.Parameter(torch.ones(2, 2))
        self.unused = nn.Parameter(torch.ones(4))
        self.zeros_on_rank_0 = nn.Parameter(torch.ones(2))


class Dtypes(nn.Module):
    """Parameters of three dtypes."""

    def __init__(self):
        super().__init__()
        self.in_float32 = nn.Linear(7, 7)
        self.in_float16 = nn.Linear(7, 5).half()
        self.in_float64 = nn.Linear(2, 2).double()
        self.in_float16_too = nn.Parameter(torch.ones(7, dtype=torch.float16))


CASES = {
    "two layers": {"model_class": Plain},
    "tied and frozen parameters": {"model_class": TiedAndFrozen},
    "missing gradients": {"model_class": Unused},
    "three dtypes": {"model_class": Dtypes},
}
RUNG_1 = Rung(
    cases=("two layers",),
    words="for the lesson's own model",
    then="in one message, and for any model, such as one with a frozen parameter.",
)
SLACK = 8  # bytes that each parameter may cost in addition
EXACT = {"rtol": 0, "atol": 0}


def gradient_of(name, parameter, rank, world_size):
    """Return the gradient of a parameter on a rank, or None."""
    if not parameter.requires_grad or name == "unused":
        return None
    if name in ("used_on_rank_0", "zeros_on_rank_0") and rank != 0:
        return None
    if name == "used_on_the_last_rank" and rank != world_size - 1:
        return None
    if name == "zeros_on_rank_0":
        return torch.zeros_like(parameter, requires_grad=False)
    positions = torch.arange(parameter.numel(), dtype=torch.float64)
    if parameter.dtype == torch.float16:
        # Two of these are too large for float16 when they are added. Their means over 1 to 5 ranks
        # are exact in float16.
        numbers = 960 * (63 - positions % 4 - 2 * rank)
    else:
        numbers = 10**rank * (positions + 1)
    gradient = torch.empty_like(parameter, requires_grad=False)
    return gradient.copy_(numbers.view(parameter.shape))


def run(average_gradients, model_class):
    """Call the learner's function on this rank."""
    torch.manual_seed(0)
    model = model_class()
    for name, parameter in model.named_parameters():
        parameter.grad = gradient_of(name, parameter, dist.get_rank(), dist.get_world_size())
    average_gradients(model)
    return results_of(model)


def results_of(model):
    """Return what is compared."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[f"the gradient of {name}"] = parameter.grad
    return {**gradients, **model.state_dict()}


def expected(rank, world_size, model_class):
    """Return what run() should return."""
    torch.manual_seed(0)
    model = model_class()
    for name, parameter in model.named_parameters():
        gradients = [gradient_of(name, parameter, each, world_size) for each in range(world_size)]
        existing = [gradient.double() for gradient in gradients if gradient is not None]
        if existing:
            parameter.grad = (sum(existing) / world_size).to(parameter.dtype)
    return results_of(model)


def limits(rank, world_size, model_class):
    """Return how much a rank may send: a message for each dtype, and one more."""
    parameters = list(model_class().parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    dtypes = {parameter.dtype for parameter in trained}
    nbytes = sum(parameter.nbytes for parameter in trained) + SLACK * len(parameters)
    return {"messages": len(dtypes) + 1, "bytes": sent_bytes("all_reduce", nbytes, world_size)}


def explain_crash(crash):
    """Put typical errors into words."""
    if "NoneType" in crash.error:
        return "A gradient is None if the parameter is frozen, or if forward() did not use it."
    if "its buffer has" in crash.error:
        return "The ranks send messages of different lengths. Do some ranks lack a gradient?"
    if "assign" in crash.error and "grad" in crash.error:
        return "All numbers of a message have the same dtype. Use one message for each dtype."
    if "not compatible" in crash.error:
        return "view() needs numbers in the order of their indices. flatten() copies if needed."
    return None


def explain(outcome):
    """Put typical mistakes into words."""
    if outcome.verdict == "HANG":
        if outcome.case["model_class"] is Unused:
            return "All ranks must send the same messages, even those that lack a gradient."
        return None
    if outcome.verdict == "COSTLY":
        return explain_costs(outcome)
    actual, right = outcome.of_rank()
    for name, mean in right.items():
        if difference(actual[name], mean, {"rtol": 1e-5, "atol": 1e-6}):
            if not name.startswith("the gradient of "):
                return f"{name} has changed. Only the gradients may change."
            parameter_name = name.removeprefix("the gradient of ")
            return explain_gradient(outcome, parameter_name, actual[name], mean)
    return None


def explain_gradient(outcome, name, actual, mean):
    """Put a wrong gradient into words."""
    size = outcome.world_size
    if mean is None:
        if name == "unused":
            return "No rank has this gradient, so it stays None: the optimizer must skip it."
        return "This parameter is frozen, so it has no gradient."
    if actual is None and name == "zeros_on_rank_0":
        return "Rank 0 has this gradient, although all its numbers are 0. Test whether it is None."
    if actual is None:
        return "Another rank has this gradient, so all ranks get the mean."
    if actual.dtype != mean.dtype or actual.shape != mean.shape:
        return None
    if not actual.isfinite().all():
        return "The sum is too large for float16. Divide before the numbers are added."
    parameter = dict(outcome.case["model_class"]().named_parameters())[name]
    gradients = [gradient_of(name, parameter, rank, size) for rank in range(size)]
    existing = [gradient.double() for gradient in gradients if gradient is not None]
    alone = sum(existing) / len(existing)
    if len(existing) < size and torch.allclose(actual.double(), alone):
        return "Divide by the number of ranks. A rank without this gradient counts as zero."
    own = gradients[outcome.rank]
    if own is not None and not difference(actual, own, EXACT):
        return "This is the rank's own gradient. Is the mean copied into parameter.grad?"
    parts = [0 if gradient is None else gradient.flatten()[0].item() for gradient in gradients]
    counts = contributions(actual.flatten()[0].item() * size, parts)
    if counts is not None and 0 in counts and all(parts):
        return f"Rank {counts.index(0)}'s gradient is missing."
    return None


def explain_costs(outcome):
    """Put it into words if too much is sent."""
    mine = outcome.messages[outcome.rank]
    kinds = {message.kind for message in mine}
    if kinds != {"all_reduce"}:
        return None
    model = outcome.case["model_class"]()
    allowed = limits(outcome.rank, outcome.world_size, **outcome.case)
    if len(mine) > allowed["messages"]:
        return "Join the gradients of one dtype with torch.cat, and send them in one message."
    if outcome.case["model_class"] is Dtypes:
        return (
            "A message has a larger dtype than the gradients. Does torch.cat join several dtypes?"
        )
    numbers = sum(message.numel for message in mine)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    needed = sum(parameter.numel() for parameter in trained)
    if frozen and numbers >= needed + sum(parameter.numel() for parameter in frozen):
        return "The frozen parameters travel as well. They have no gradient on any rank."
    if frozen and numbers >= needed + model.embedding.weight.numel():
        return "The tied parameter travels twice. model.parameters() yields it once."
    return None
