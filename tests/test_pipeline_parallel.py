"""The pipeline lesson: the numbers of one process with each schedule, for any nn.Sequential."""

import re

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, one_line, single_gpu, train
from forked import in_ranks, join
from pipeline_parallel import STAGES_PER_RANK, Pipeline, connect, cut, fill, possible_starts
from torch import nn
from torch.nn import functional as F

from common.models import CNN, MLP

ONE_EPOCH = (*DIGITS, "--batch_size", 120, "--epochs", 1)
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2, "--double")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("processes", "schedule", "network"),
    [
        (3, "1F1B", {"width": 50}),
        (3, "Interleaved1F1B", {"layers": 7}),
        (3, "InterleavedZeroBubble", {"layers": 5, "width": 32}),
    ],
)
def test_numbers_are_those_of_one_process(processes, schedule, network):
    """Other sizes than those of test_parity.py: the losses of single_gpu.py, to 1e-10."""
    flags = list(TWO_EPOCHS)
    for name, value in network.items():
        flags += [f"--{name}", value]
    right = [line["loss"] for line in single_gpu(*flags)]
    flags += ["--schedule", schedule, "--micro_batches", 6]
    out = train("pipeline_parallel", *flags, processes=processes).stdout
    assert [line["loss"] for line in epochs(out)] == pytest.approx(right, abs=1e-10)


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


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
}


def numpy_of(state):
    """Return a copy of a dict, with arrays in place of tensors."""
    copy = {}
    for key, value in state.items():
        copy[key] = value.numpy(force=True).copy() if torch.is_tensor(value) else value
    return copy


def two_steps(rank, world_size, port, results, name, frozen, optimizer):
    """Train an unusual model as one of some ranks. Returns the state of this rank's stages."""
    join(rank, world_size, port)
    layers = unusual(frozen)
    model = Pipeline(cut(layers, world_size * STAGES_PER_RANK[name]), CPU, name, 4)
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    connect(model, [batch()], CPU)
    assert torch.get_default_dtype() == torch.float32
    for _ in range(2):
        optimizer.zero_grad()
        model(*batch())
        optimizer.step()
    own = {*model.parameters(), *model.buffers()}
    found = {}
    for key, tensor in layers.state_dict(keep_vars=True).items():
        if tensor in own:
            averages = optimizer.state.get(tensor, {})
            found[key] = numpy_of({"value": tensor} | averages)
    results[rank] = found
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("world_size", "name", "frozen", "optimizer"),
    [
        (1, "GPipe", (), "AdamW"),
        (3, "GPipe", (1, 5), "SGD"),
        (4, "1F1B", (9,), "Adagrad"),
        (2, "Interleaved1F1B", (1,), "momentum"),
        (2, "InterleavedZeroBubble", (3,), "momentum"),
    ],
)
def test_any_sequential(world_size, name, frozen, optimizer):
    """Frozen, tied and unused parameters, buffers, any optimizer: the state of one process."""
    if name == "InterleavedZeroBubble" and torch.__version__.startswith("2.9."):
        pytest.skip("PyTorch 2.9 computes wrong gradients of tied parameters with this schedule")
    layers = unusual(frozen)
    trained = OPTIMIZERS[optimizer](layers.parameters())
    for _ in range(2):
        trained.zero_grad()
        images, labels = batch()
        F.cross_entropy(layers(images), labels).backward()
        trained.step()
    done = in_ranks(two_steps, world_size, name, frozen, optimizer)
    assert len(done) == world_size
    found = {}
    for state in done.values():
        assert not found.keys() & state.keys()
        found |= state
    expected = layers.state_dict(keep_vars=True)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        right = numpy_of({"value": tensor} | trained.state.get(tensor, {}))
        assert found[key].keys() == right.keys()
        for kind, value in right.items():
            assert found[key][kind] == pytest.approx(value, rel=0, abs=1e-12), (key, kind)


def test_a_step_that_fails_restores_the_default_dtype():
    """connect() changes it for one step only, for PyTorch 2.9."""
    seen = []

    def model(images, labels):
        seen.append(torch.get_default_dtype())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        connect(model, [batch()], CPU)
    assert seen == [torch.float64] and torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("lesson", "flags"),
    [
        ("manual_pipeline", ()),
        ("pipeline_parallel", ()),
        ("pipeline_parallel", ("--schedule", "Interleaved1F1B")),
    ],
)
def test_a_rank_holds_only_what_it_says_that_it_keeps(lesson, flags, change):
    """All parameters in its memory are counted, and all ranks together have 59,210."""
    counted = "(parameter.numel() for parameter in model.parameters())"
    alive = "(each.numel() for each in gc.get_objects() if isinstance(each, torch.nn.Parameter))"
    copy = change(lesson, (counted, alive), ("import os\n", "import gc\nimport os\n"))
    pattern = r"^rank \d keeps .*?([\d,]{3,}) parameters"
    kept = []
    for path in (lesson, copy):
        out = train(path, *ONE_EPOCH, *flags, processes=2).stdout
        kept.append([int(each.replace(",", "")) for each in re.findall(pattern, out, re.M)])
    assert kept == [[54_400, 4_810]] * 2


@pytest.mark.parametrize(("network", "layers"), [(MLP, 4), (CNN, 4)])
def test_cutting_a_model(network, layers):
    """The stages together are the model, and have about equally many layers."""
    model = network()
    images = torch.randn(3, 1, 28, 28)
    for count in range(1, layers + 1):
        parts = cut(nn.Sequential(*model.stage1, *model.stage2), count)
        counts = [len(list(part.parameters())) // 2 for part in parts]
        assert sum(counts) == layers and max(counts) - min(counts) <= 1
        together = []
        for part in parts:
            together += [id(parameter) for parameter in part.parameters()]
        assert together == [id(parameter) for parameter in model.parameters()]
        activations = images
        for part in parts:
            activations = part(activations)
        assert activations.equal(model(images))


def test_cutting_any_sequential():
    """No module is lost, and no stage but the last one ends with a view."""
    layers = unusual()
    for count in range(1, 6):
        parts = cut(layers, count)
        assert len(parts) == count
        together = []
        for part in parts:
            together += [id(module) for module in part]
        assert together == [id(module) for module in layers]
        activations = batch()[0]
        for part in parts[:-1]:
            activations = part(activations)
            assert not activations._is_view()
    assert len(possible_starts(layers)) == 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_filling_a_batch(dtype):
    """Images of the same dtype follow, up to the size of a batch, and add nothing to the loss."""
    images = torch.ones(3, 10, dtype=dtype)
    labels = torch.tensor([1, 2, 3])
    filled, filled_labels = fill(5, (images, labels))
    assert filled.shape == (5, 10) and filled.dtype == dtype
    assert filled[:3].equal(images) and not filled[3:].any()
    loss = F.cross_entropy(filled, filled_labels, reduction="sum")
    assert loss == F.cross_entropy(images, labels, reduction="sum")
    same = fill(3, (images, labels))
    assert same[0].equal(images) and same[1].equal(labels)


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (5, (), ("5 stages, but only 4 layers", "a larger --layers")),
        (3, ("--model", "cnn", "--schedule", "Interleaved1F1B"), ("6 stages", "a larger --layers")),
        (
            2,
            ("--micro_batches", 7),
            ("7 micro-batches cannot divide --batch_size 120", "use --batch_size 119"),
        ),
        (
            2,
            ("--schedule", "1F1B", "--micro_batches", 1),
            ("1F1B needs one for each rank", "--micro_batches 2"),
        ),
        (
            4,
            ("--layers", 7, "--schedule", "Interleaved1F1B", "--micro_batches", 7),
            ("a multiple of 4", "--micro_batches 8"),
        ),
        (1, ("--schedule", "Interleaved1F1B"), ("Interleaved1F1B needs 2 ranks or more",)),
        (2, ("--schedule", "ZeroBubble"), ("invalid choice", "InterleavedZeroBubble")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = main("pipeline_parallel", *DIGITS, "--batch_size", 120, *flags, env=env)
    one_line(done, *words)
