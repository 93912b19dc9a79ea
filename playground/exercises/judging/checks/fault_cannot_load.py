"""How fault_cannot_load is checked."""

import pickle
import time
from pathlib import Path

import torch
from judging.single import step, together
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 1 rank, two layers ... has no key `0.weight`, but `module.0.weight`"
CASES = {
    "two layers": {"kind": "plain"},
    "layers whose names contain `module`": {"kind": "named"},
    "a buffer and a frozen parameter": {"kind": "buffer"},
    "a state that rank 0 needs a second to collect": {"kind": "slow"},
}
PATH = "checkpoint.pt"
RIGHT = "can be loaded"
HINTS = """
Which keys does the state of the plain model have, and which does the state of the trained model
have? What kind of object is the model that is trained?

DistributedDataParallel is a model of its own, which contains the plain model as an attribute called
`module`. So each of its keys begins with `module.`.

state = {"model": the state_dict() of the model inside DDP}
"""


class Buffered(torch.nn.Module):
    """A model with a buffer that training changes, and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.linear.bias.requires_grad_(False)
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, images):
        if self.training:
            self.steps += 1
        return self.linear(images)


def make_model(kind):
    torch.manual_seed(3)
    if kind == "buffer":
        return Buffered()
    layers = [torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)]
    model = torch.nn.Sequential(*layers)
    if kind == "named":
        # str.lstrip("module.") would also remove the beginning of `outer`.
        inner = torch.nn.Sequential()
        inner.add_module("module", layers[0])
        model = torch.nn.Sequential()
        model.add_module("inner", inner)
        model.add_module("outer", layers[2])
    return model


def part(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(4, 3, generator=generator), torch.tensor([0, 1, 1, 0])


def run(train, rank, world_size, kind):
    """Call the learner's function on this rank, then read the checkpoint as another program."""
    images, labels = part(rank)
    model = make_model(kind)
    if kind == "slow" and rank == 0 and world_size > 1:
        # A rank that waits for half a second only returns before there is a file.
        model.register_state_dict_pre_hook(lambda *_: time.sleep(1))
    train(model, images, labels, PATH)
    state, words = read(make_model(kind))
    return {"the checkpoint": words, "the loaded model": state}


def read(model):
    """Load the checkpoint into a model. Returns the model's state, and in words what is wrong."""
    if not Path(PATH).exists():
        return None, "does not exist"
    try:
        saved = torch.load(PATH, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:
        objects = "weights_only" in str(error)
        return None, "contains Python objects that are not tensors" if objects else "is damaged"
    if not isinstance(saved, dict) or not isinstance(saved.get("model"), dict):
        return None, 'has no dict "model"'
    state = saved["model"]
    keys = list(model.state_dict())
    lacking = [key for key in keys if key not in state]
    other = [key for key in state if key not in keys]
    if lacking:
        return None, f"has no key `{lacking[0]}`" + (f", but `{other[0]}`" if other else "")
    if other:
        return None, f"has the key `{other[0]}`, which the model does not have"
    model.load_state_dict(state)
    return dict(model.state_dict()), RIGHT


def expected(rank, world_size, kind):
    model = make_model(kind)
    images, labels = together([part(each) for each in range(world_size)])
    for _ in range(2):
        step(model, F.cross_entropy(model(images), labels))
    return {"the checkpoint": RIGHT, "the loaded model": dict(model.state_dict())}


REPAIR = ("model.state_dict()", "model.module.state_dict()")
WHY = "model.module is the model inside DDP, so its keys are those of the plain model."
EARLY = "rank [1-9], the checkpoint: (does not exist|is damaged)"
WORDS = {EARLY: "This rank returned before rank 0 had written the file."}
STATE = REPAIR[1]
REPLACED = '{key.replace("module.", ""): each for key, each in model.state_dict().items()}'
MISTAKES = {
    "has no key `inner.module.weight`, but": (STATE, REPLACED),
    "contains Python objects that are not tensors": (STATE, "model.module"),
    "has no key `steps`": (STATE, "dict(model.module.named_parameters())"),
    "the loaded model, 0.weight: [": (
        *("    model = DistributedDataParallel(model)\n", ""),
        *REPAIR[::-1],
    ),
    WORDS[EARLY]: ("    dist.barrier()", "    pass"),
}
