"""The pipeline lesson: the numbers of one process with each schedule, for any nn.Sequential.

And the timelines of this lesson and of model_parallel.py.
"""

import re

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, one_line, run, single_gpu, train
from forked import in_ranks, join
from pipeline_parallel import STAGES_PER_RANK, cut, fill, pipeline, possible_starts
from torch import nn
from torch.nn import functional as F

from common.models import CNN, MLP
from measure.timeline import COLUMNS, Span, as_text, bubble, duration, most_kept, show

TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2, "--double")


@pytest.fixture
def double():
    """Make float64 the default, as the lesson does for PyTorch 2.9."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("processes", "schedule", "network"),
    [
        (None, "1F1B", {}),
        (4, "GPipe", {}),
        (3, "1F1B", {"width": 50}),
        (3, "Interleaved1F1B", {"layers": 7}),
        (2, "InterleavedZeroBubble", {"layers": 4}),
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
    parts = cut(layers, world_size * STAGES_PER_RANK[name])
    schedule, _ = pipeline(parts, torch.device("cpu"), name, 4)
    optimizer = OPTIMIZERS[optimizer](layers.parameters())
    images, labels = batch()
    inputs = [images] if rank == 0 else []
    for _ in range(2):
        optimizer.zero_grad()
        schedule.step(*inputs, target=labels)
        optimizer.step()
    own = set()
    for part in parts[rank::world_size]:
        own |= {*part.parameters(), *part.buffers()}
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
        (2, "GPipe", (5,), "SGD"),
        (3, "GPipe", (1,), "momentum"),
        (4, "1F1B", (9,), "Adagrad"),
        (2, "1F1B", (1, 3), "AdamW"),
        (2, "Interleaved1F1B", (1,), "momentum"),
        (2, "InterleavedZeroBubble", (), "AdamW"),
        (2, "InterleavedZeroBubble", (3,), "momentum"),
    ],
)
def test_any_sequential(world_size, name, frozen, optimizer, double):
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_filling_a_batch(dtype):
    """Zeros follow, of the same dtype, up to the size of a batch."""
    tensor = torch.ones(3, 2, 5, dtype=dtype)
    filled = fill(tensor, 4)
    assert filled.shape == (4, 2, 5) and filled.dtype == dtype
    assert filled[:3].equal(tensor) and not filled[3].any()
    assert fill(tensor, 3).equal(tensor)


def test_the_timeline_of_a_pipeline(tmp_path):
    """A line for each rank with all micro-batches, the bubble and its formula, and a figure."""
    wide = ("--width", 256, "--layers", 6, "--batch_size", 1200, "--epochs", 1)
    flags = (*DIGITS, *wide, "--plot", tmp_path / "t.png")
    out = train("pipeline_parallel", *flags, processes=2).stdout
    line = r"^\w+, (\d) micro-batch(?:es)?: ([\d.]+) s, bubble ([\d.]+), .* = ([\d.]+)$"
    titles = re.findall(line, out, re.M)
    assert [(int(count), formula) for count, _, _, formula in titles] == [(8, "0.11"), (1, "0.50")]
    assert all(0 < float(waiting) < 1 for _, _, waiting, _ in titles)
    # With one micro-batch, each rank waits for the other, for at least half of the time.
    assert float(titles[1][2]) >= 0.45
    rows = re.findall(r"^rank (\d) \|([a-h0-7.]+)\|$", out, re.M)
    assert [rank for rank, _ in rows] == ["0", "1"] * 2
    assert {len(row) for _, row in rows} == {COLUMNS}
    # A single micro-batch starts on rank 0, and its gradient ends there.
    assert (rows[2][1][0], rows[2][1][-1]) == ("0", "a")
    speed = re.search(r"^the first is ([\d.]+) times as fast as the second$", out, re.M)[1]
    assert float(speed) == pytest.approx(float(titles[1][1]) / float(titles[0][1]), abs=0.02)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_one_rank_takes_no_turns():
    """Without torchrun a schedule for several ranks is GPipe, and the timeline says so."""
    flags = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--schedule", "Interleaved1F1B")
    out = run("pipeline_parallel", *flags).stdout
    assert re.findall(r"^(\w+), (\d) micro-batch", out, re.M) == [
        ("GPipe", "8"),
        ("LoopedBFS", "1"),
    ]


def ideal(ranks, count):
    """Return the spans of GPipe with steps of one second."""
    spans = []
    half = count + ranks - 1
    for rank in range(ranks):
        for number in range(count):
            start = rank + number
            spans.append(Span(rank, "forward", number, start, start + 1))
            start = half + ranks - 1 - rank + number
            spans.append(Span(rank, "backward", number, start, start + 1))
    return spans


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 1), (2, 8), (3, 5), (4, 12)])
def test_the_bubble_of_an_ideal_pipeline_is_the_formula(ranks, count):
    """(p-1)/(m+p-1), and the step takes 2(m+p-1) seconds."""
    spans = ideal(ranks, count)
    assert duration(spans) == 2 * (count + ranks - 1)
    assert bubble(spans, ranks) == pytest.approx((ranks - 1) / (count + ranks - 1))


def test_the_activations_that_are_kept():
    """All micro-batches with GPipe. Of two stages on a rank, each counts as a half."""
    assert [most_kept(ideal(2, 5), rank) for rank in range(2)] == [5, 5]
    spans = [Span(0, "forward", 0, 0, 1, 0), Span(0, "forward", 0, 1, 2, 2)]
    spans += [Span(0, "backward", 0, 2, 3, 2), Span(0, "forward", 1, 3, 4, 0)]
    assert most_kept(spans + [Span(0, "backward", 0, 4, 5, 0)], 0) == 1
    spans.append(Span(0, "weights", 0, 5, 6, 2))
    assert most_kept(spans + [Span(0, "backward", 0, 6, 7, 0)], 0) == 1.5


def test_the_timeline_as_text():
    """A column shows what fills more than half of it."""
    text = as_text([*ideal(2, 3), Span(0, "weights", 1, 3.0, 4.0)], ["a", "bb"])
    width = COLUMNS // 8
    first = "".join(sign * width for sign in "012B.abc")
    second = "".join(sign * width for sign in ".012abc.")
    assert text.splitlines() == [f"a |{first}|", f"bb |{second}|"]
    spans = [Span(0, "forward", 12, 0, 1), Span(0, "backward", 27, 1, 2)]
    assert as_text(spans, ["x"]) == f"x |{'2' * 44}{'b' * 44}|"


@pytest.mark.parametrize(("schedule", "whose"), [("1F1B", ""), ("Interleaved1F1B", "GPipe's ")])
def test_the_formula_is_that_of_one_stage_on_each_rank(schedule, whose, capsys):
    """With two stages on a rank the bubble has a different formula, and the title says so."""
    show({(schedule, 8): ideal(2, 8)}, ["rank 0", "rank 1"], None)
    title = f"{schedule}, 8 micro-batches: 18.0000 s, bubble 0.11, {whose}(p-1)/(m+p-1) = 0.11"
    assert capsys.readouterr().out.splitlines()[0] == title


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_timeline_of_one_process(model):
    """With both stages of model_parallel.py on the CPU, at no moment do both compute."""
    wide = ("--width", 256, "--batch_size", 1200, "--epochs", 1, "--model", model)
    out = run("model_parallel", *DIGITS, *wide, "--pipelined").stdout
    rows = re.findall(r"^stage(\d) \|([a-d0-3.]+)\|$", out, re.M)
    assert [stage for stage, _ in rows] == ["1", "2"] * 2
    for (_, one), (_, other) in ((rows[0], rows[1]), (rows[2], rows[3])):
        assert all("." in pair for pair in zip(one, other, strict=True)), (one, other)
    assert set("0123abcd") <= set(rows[0][1])
    assert all(float(waiting) >= 0.5 for waiting in re.findall(r"bubble ([\d.]+)", out))
    assert "nothing can overlap" in out
    alone = run("model_parallel", *DIGITS, *wide).stdout
    assert len(re.findall(r"^stage\d \|", alone, re.M)) == 2
    assert "times as fast" not in alone


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (5, (), ("5 stages are too many for 4 layers", "--layers")),
        (3, ("--model", "cnn", "--schedule", "Interleaved1F1B"), ("6 stages", "a larger --layers")),
        (
            2,
            ("--micro_batches", 7),
            ("--batch_size 120 cannot be split into 7 equal", "use --batch_size 119"),
        ),
        (2, ("--micro_batches", 1), ("GPipe needs at least 2", "--micro_batches 2")),
        (
            2,
            ("--schedule", "1F1B", "--micro_batches", 1),
            ("1F1B needs at least 2", "--micro_batches 2"),
        ),
        (
            2,
            ("--schedule", "InterleavedZeroBubble", "--micro_batches", 1),
            ("a multiple of 2", "--micro_batches 2"),
        ),
        (
            4,
            ("--layers", 7, "--schedule", "Interleaved1F1B", "--micro_batches", 7),
            ("a multiple of 4", "--micro_batches 8"),
        ),
        (2, ("--schedule", "ZeroBubble"), ("invalid choice", "InterleavedZeroBubble")),
        (2, ("--plot", "/proc/x/t.png"), ("cannot write --plot",)),
        (2, ("--plot", "t.docx"), ("--plot t.docx has a format", "use t.png")),
        (2, ("--micro_batches", 0), ("must be 1 or more",)),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = main("pipeline_parallel", *DIGITS, "--batch_size", 120, *flags, env=env)
    one_line(done, *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ("--pipelined", "--micro_batches", 1000),
            ("a batch of 128 images has at most 128", "use --micro_batches 128"),
        ),
        (("--devices", "cpu", "cuda:99"), ("--devices", "cuda:99", "choose from")),
        (("--micro_batches", 0), ("must be 1 or more",)),
    ],
)
def test_flags_of_one_process_that_cannot_work(flags, words, main):
    """The same for the lesson with two devices."""
    one_line(main("model_parallel", *DIGITS, *flags), *words)
