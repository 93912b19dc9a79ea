"""The pipeline lesson: the numbers of one process with each schedule, for any nn.Sequential."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from conftest import SHORT, run
from pipeline_parallel import V_SHAPED, connect, make_1f1b, make_other
from torch import nn
from torch.nn import functional as F

from watching.ranks import call

CPU = torch.device("cpu")


class Block(nn.Module):
    """Two layers with one weight, a parameter that nothing uses, and a buffer."""

    def __init__(self, width):
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width, bias=False)
        self.two.weight = self.one.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("largest", torch.tensor(0.0))

    def forward(self, x):
        """Remember the largest number that has come, in place, as batch norm does.

        The pipeline runs each stage once before training, on numbers that nobody has set, and
        restores the buffers after that. It cannot restore a buffer that was replaced by another.
        """
        self.largest.copy_(torch.maximum(self.largest, x.detach().max()))
        return self.two(torch.tanh(self.one(x)))


def unusual(frozen=()):
    """Return layers with views, tied and unused parameters, a buffer, and frozen parameters."""
    torch.manual_seed(1)
    layers = nn.Sequential(
        nn.ZeroPad2d(1),  # has no parameters, and stands before the first one that has
        nn.Conv2d(1, 2, 3),
        nn.Flatten(),
        nn.Linear(72, 7, bias=False),
        nn.Softplus(),
        Block(7),
        nn.ReLU(inplace=True),
        nn.Linear(7, 6),
        nn.Tanh(),
        nn.Linear(6, 4),
    )
    layers[7].bias.requires_grad_(False)
    for index in frozen:
        layers[index].requires_grad_(False)
    return layers.double()


def batch():
    """Return images and labels."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(12, 1, 6, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(4, (12,), generator=generator)


def two_steps(rank, name, frozen):
    """Train an unusual model in a pipeline and as a whole, and compare what this rank keeps."""
    layers = unusual(frozen)
    whole = copy.deepcopy(layers)
    world_size = dist.get_world_size()
    model = make_1f1b(layers, CPU, 4) if name == "1F1B" else make_other(name, layers, CPU, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    in_one_process = torch.optim.AdamW(whole.parameters(), lr=0.1)
    connect(model, [batch()], CPU)
    assert torch.get_default_dtype() == torch.float32
    images, labels = batch()
    for _ in range(2):
        optimizer.zero_grad()
        model(images, labels)
        optimizer.step()
        in_one_process.zero_grad()
        F.cross_entropy(whole(images), labels).backward()
        in_one_process.step()
    own = {*model.parameters(), *model.buffers()}
    right = whole.state_dict()
    kept = []
    for key, tensor in layers.state_dict(keep_vars=True).items():
        if tensor in own:
            torch.testing.assert_close(tensor.detach(), right[key], atol=1e-12, rtol=0)
            kept.append(key)
    by_rank = [None] * world_size
    dist.all_gather_object(by_rank, kept)
    assert sorted(sum(by_rank, [])) == sorted(right)


@pytest.mark.parametrize(
    ("world_size", "name", "frozen"),
    [
        (3, "GPipe", (1,)),
        (4, "1F1B", (9,)),
        (2, "Interleaved1F1B", (1, 3)),
        (2, "InterleavedZeroBubble", (3,)),
        (2, "ZBVZeroBubble", (3,)),
        (2, "DualPipeV", (9,)),
    ],
)
def test_any_sequential(world_size, name, frozen):
    """Frozen, tied and unused parameters, and buffers: those of one process."""
    splits_backward = name in ("InterleavedZeroBubble", *V_SHAPED)
    if splits_backward and torch.__version__.startswith("2.9."):
        pytest.skip("PyTorch 2.9 computes wrong gradients of tied parameters, or cannot run this")
    call(two_steps, world_size, name, frozen)


@pytest.mark.parametrize(
    ("lesson", "flags"),
    [("manual_pipeline", ()), ("pipeline_parallel", ("--schedule", "Interleaved1F1B"))],
)
def test_a_rank_holds_only_what_it_says_that_it_keeps(lesson, flags, change):
    """All parameters in its memory are counted, and the numbers are those of the docstring."""
    counted = "sum(parameter.numel() for parameter in model.parameters())\n"
    check = f"""    alive = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
    assert sum(each.numel() for each in alive) == {counted}"""
    changed = change(lesson, (counted, counted + check), ("import os\n", "import gc\nimport os\n"))
    out = run(changed, *SHORT, *flags, processes=2).stdout
    assert re.findall(r"keeps .*?([\d,]{3,}) parameters", out) == ["54,400", "4,810"]
