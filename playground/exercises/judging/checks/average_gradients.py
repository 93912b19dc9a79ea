"""How average_gradients is checked."""

from collections import defaultdict

import torch
import torch.distributed as dist
from judging.single import digits_of, gradients_of, large_of, mean_of, seeded
from judging.traffic import sent_bytes
from torch import nn


def two_layers():
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))


def tied_and_frozen():
    """Return a model with a tied parameter, frozen ones, buffers, one without an axis, a view."""
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 5), "output": nn.Linear(5, 7)})
    model["output"].weight = model["embedding"].weight
    model["frozen"] = nn.Linear(9, 9).requires_grad_(False)
    model["norm"] = nn.BatchNorm1d(5)
    model.scale = nn.Parameter(torch.ones(()))
    model.transposed = nn.Parameter(torch.ones(3, 2).t())
    return model


def unused():
    """Return parameters that have no gradient on some ranks, or on all."""
    names = ("used", "used_on_rank_0", "used_on_the_last_rank", "unused", "zeros_on_rank_0")
    return nn.ParameterDict({name: torch.ones(2, 2) for name in names})


def dtypes():
    return nn.ModuleDict(
        {
            "in_float32": nn.Linear(7, 7),
            "in_float16": nn.Linear(7, 5).half(),
            "in_float64": nn.Linear(2, 2).double(),
        }
    )


CASES = {
    "two layers": {"make": two_layers},
    "tied and frozen parameters": {"make": tied_and_frozen},
    "missing gradients": {"make": unused},
    "three dtypes": {"make": dtypes},
}
RUNG_1 = "for the lesson's own model"
RUNG_2 = "in one message, and for any model, such as one with a frozen parameter."
SLACK = 8  # bytes that each parameter may cost in addition
STARTS = True
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
    if not parameter.requires_grad or name == "unused":
        return None
    if name in ("used_on_rank_0", "zeros_on_rank_0") and rank != 0:
        return None
    if name == "used_on_the_last_rank" and rank != world_size - 1:
        return None
    if name == "zeros_on_rank_0":
        return torch.zeros_like(parameter, requires_grad=False)
    gradient = torch.empty_like(parameter, requires_grad=False)
    numbers_of = large_of if parameter.dtype == torch.float16 else digits_of
    return gradient.copy_(numbers_of(rank, parameter.shape))


def with_gradients(make, rank, world_size):
    model = seeded(make)
    for name, parameter in model.named_parameters():
        parameter.grad = gradient_of(name, parameter, rank, world_size)
    return model


def run(average_gradients, rank, world_size, make):
    model = with_gradients(make, rank, world_size)
    average_gradients(model)
    return results_of(model)


def results_of(model):
    return {**gradients_of(model), **model.state_dict()}


def expected(rank, world_size, make):
    model = seeded(make)
    for name, parameter in model.named_parameters():
        gradients = [gradient_of(name, parameter, each, world_size) for each in range(world_size)]
        parameter.grad = mean_of(gradients)
    return results_of(model)


def limits(rank, world_size, make):
    """Return how much a rank may send: a message for each dtype, and one more."""
    parameters = list(make().parameters())
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


NO_GRADIENT = "CRASH.*NoneType"
DIFFERENT = "missing.*its buffer has|HANG, missing"
ASSIGN = "CRASH.*assign.*grad"
ZEROS = "expected +None"
OTHER = "gradient of .*: None"
INFINITE = r"float16.*: \[inf"
WORDS = {
    NO_GRADIENT: "A gradient is None if the parameter is frozen, or if forward() did not use it.",
    DIFFERENT: "The ranks send different messages. Some ranks lack a gradient here.",
    ASSIGN: "All numbers of a message have the same dtype. Use one message for each dtype.",
    "messages;": "Join the gradients of one dtype with torch.cat, and send them in one message.",
    ZEROS: "No rank has this gradient, so it stays None: the optimizer must skip it.",
    OTHER: "Some rank has this gradient, so all ranks get the mean, even if all its numbers are 0.",
    INFINITE: "The sum is too large for float16. Divide before the numbers are added.",
}
FLAG = "if flag > 0:"
MEAN = "mean.view_as(parameter)"
DIVIDE = "message /= dist.get_world_size()"
REDUCE = "dist.all_reduce(message)"
MISTAKES = {
    WORDS[NO_GRADIENT]: ("torch.zeros_like(parameter) if missing else ", ""),
    WORDS[DIFFERENT]: ("parameter.requires_grad", "parameter.grad is not None"),
    WORDS[ASSIGN]: ("buckets[parameter.dtype]", "buckets[None]"),
    WORDS["messages;"]: ("buckets[parameter.dtype]", "buckets[parameter]"),
    WORDS[ZEROS]: (FLAG, "if True:"),
    WORDS[OTHER]: (FLAG, "if parameter.grad is not None:"),
    WORDS[INFINITE]: (DIVIDE, "pass", REDUCE, f"{REDUCE}; {DIVIDE}"),
    "2 times what is expected": (MEAN, f"{MEAN} / flag"),
    "It is unchanged, like all that is wrong.": (f"parameter.grad = {MEAN}", "pass"),
}
