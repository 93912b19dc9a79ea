"""How average_gradients is checked."""

from collections import defaultdict

import torch
import torch.distributed as dist
from judging.attempt import Rung
from judging.traffic import sent_bytes
from torch import nn


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
IMITATED = True
HINTS = """
One message, with tied and frozen parameters: take the parameters with requires_grad, of which
model.parameters() yields a tied one once. torch.cat joins tensors with one axis, and flatten()
gives any gradient one axis. After all_reduce, message.split(sizes) returns the parts as views, and
part.view_as(parameter) gives a part its shape.

Missing gradients: all ranks must send messages of the same length, but a rank does not know which
gradients the others have. So it sends zeros for a gradient that it lacks, and behind all gradients
a flag for each of them: 1 if it has it, otherwise 0. If the sum of a flag is above 0, some rank has
this gradient, and its part of the message is the mean. Otherwise it stays None.

Three dtypes: all numbers of a message have one dtype, so there is a message for each dtype.
    for the trained parameters of each dtype:
        message = the gradients, or zeros, and a flag for each of them
        divide the message by n, and all_reduce it (the sum may be too large for float16)
        for each parameter: if its flag is above 0, keep its part of the message as its gradient
"""


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


def average_gradients(model):
    """Why: all ranks send zeros for a missing gradient, so their messages have the same length."""
    buckets = defaultdict(list)
    for parameter in model.parameters():
        if parameter.requires_grad:
            buckets[parameter.dtype].append(parameter)
    for parameters in buckets.values():
        parts = []
        flags = []  # 1 where this rank has a gradient
        for parameter in parameters:
            missing = parameter.grad is None
            gradient = torch.zeros_like(parameter) if missing else parameter.grad
            parts.append(gradient.flatten())
            flags.append(0.0 if missing else 1.0)
        message = torch.cat([*parts, parts[0].new_tensor(flags)])
        message /= dist.get_world_size()  # before the sum, which may be too large for float16
        dist.all_reduce(message)
        sizes = [len(part) for part in parts]
        *means, flags = message.split([*sizes, len(sizes)])
        for parameter, mean, flag in zip(parameters, means, flags.tolist(), strict=True):
            if flag > 0:
                parameter.grad = mean.view_as(parameter)


def one_by_one(model):
    """Send a message for each gradient."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)


WORDS = {
    "CRASH.*NoneType": "A gradient is None if the parameter is frozen, or if forward() did not use "
    "it.",
    "its buffer has|HANG, missing": "The ranks send different messages. Do some ranks lack a "
    "gradient?",
    "CRASH.*assign.*grad": "All numbers of a message have the same dtype. Use one message for each "
    "dtype.",
    "CRASH.*not compatible": "view() needs numbers in the order of their indices. flatten() copies "
    "if needed.",
    "messages;": "Join the gradients of one dtype with torch.cat, and send them in one message.",
    "dtypes.* bytes;": "A message has a larger dtype than the gradients. Does torch.cat join "
    "several dtypes?",
    "frozen.* bytes;": "Do frozen parameters travel, which have no gradient? Or does the tied one "
    "travel twice? model.parameters() yields it once.",
    "unused: .*expected +None": "No rank has this gradient, so it stays None: the optimizer must "
    "skip it.",
    "expected +None": "This parameter is frozen, so it has no gradient.",
    "zeros_on_rank_0: None": "Rank 0 has this gradient, although all its numbers are 0. Test "
    "whether it is None.",
    "gradient of .*: None": "Another rank has this gradient, so all ranks get the mean.",
    "float16.*: \\[inf": "The sum is too large for float16. Divide before the numbers are added.",
    "rank ., (?!the gradient)": "Only the gradients may change.",
}
FLAG = "if flag > 0:"
MEAN = "mean.view_as(parameter)"
DIVIDE = "message /= dist.get_world_size()"
REDUCE = "dist.all_reduce(message)"
MISTAKES = {
    WORDS["CRASH.*NoneType"]: ("torch.zeros_like(parameter) if missing else ", ""),
    WORDS["its buffer has|HANG, missing"]: (
        "parameter.requires_grad",
        "parameter.grad is not None",
    ),
    WORDS["CRASH.*assign.*grad"]: ("buckets[parameter.dtype]", "buckets[None]"),
    WORDS["CRASH.*not compatible"]: ("gradient.flatten()", "gradient.view(-1)"),
    WORDS["messages;"]: one_by_one,
    WORDS["dtypes.* bytes;"]: (
        *("buckets[parameter.dtype]", "buckets[None]"),
        *(MEAN, f"{MEAN}.to(parameter.dtype)"),
    ),
    WORDS["frozen.* bytes;"]: ("if parameter.requires_grad:", "if True:"),
    WORDS["unused: .*expected +None"]: (FLAG, "if True:"),
    WORDS["expected +None"]: ("if parameter.requires_grad:", "if True:", FLAG, "if True:"),
    WORDS["zeros_on_rank_0: None"]: (
        *("parameter.grad is None", "parameter.grad is None or not parameter.grad.any()"),
    ),
    WORDS["gradient of .*: None"]: (FLAG, "if parameter.grad is not None:"),
    WORDS["float16.*: \\[inf"]: (DIVIDE, "pass", REDUCE, f"{REDUCE}; {DIVIDE}"),
    WORDS["rank ., (?!the gradient)"]: (MEAN, f"{MEAN}; parameter.data.add_(1)"),
    "This is the rank's own gradient. Is the mean copied into parameter.grad?": (
        *(f"parameter.grad = {MEAN}", "pass"),
    ),
    "Divide by the number of ranks. A rank without this gradient counts as zero.": (
        *(MEAN, f"{MEAN} / flag"),
    ),
}
