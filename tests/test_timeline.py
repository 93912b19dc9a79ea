"""The pipeline lesson: the gradients of one process, whatever the schedule; its timeline, and model_parallel.py's."""

import re

import pytest
import torch
from conftest import DIGITS, run, train
from pipeline_parallel import cut
from torch.nn import functional as F

from common.data import load
from common.models import CNN, MLP, MODELS
from measure.timeline import COLUMNS, Span, as_text, bubble, duration, show

ONE_STEP = (*DIGITS, "--batch_size", 1500, "--epochs", 1, "--double")


@pytest.fixture
def double():
    """Make float64 the default, as --double does."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def reference(model="mlp", width=None, layers=None):
    """Return the names of the weights and the gradients of plain PyTorch on all digits: a step of single_gpu.py."""
    torch.manual_seed(0)
    network = MODELS[model](width, layers)
    images = load("digits", None)[0]
    F.cross_entropy(network(images.images), images.labels).backward()
    return [name for name, _ in network.named_parameters()], [weight.grad for weight in network.parameters()]


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
def test_gradients_are_those_of_one_process(processes, schedule, network, tmp_path, double):
    """To 1e-12, and none of them is missing, after one step with all 1,500 images."""
    names, expected = reference(**network)
    flags = [word for name, value in network.items() for word in (f"--{name}", value)]
    pipeline = ("--schedule", schedule, "--micro_batches", 6, "-s", tmp_path / "c.pt")
    train("pipeline_parallel", *ONE_STEP, *flags, *pipeline, processes=processes)
    checkpoint = torch.load(tmp_path / "c.pt", weights_only=True)
    assert list(checkpoint["model"]) == names
    states = checkpoint["optimizer"]["state"]
    assert sorted(states) == list(range(len(names)))
    for place, gradient in enumerate(expected):
        assert states[place]["step"] == 1
        torch.testing.assert_close(states[place]["exp_avg"] * 10, gradient, atol=1e-12, rtol=0)  # Adam's first average
        assert gradient.abs().max() > 1e-5


def test_the_timeline_of_a_pipeline(tmp_path):
    """A line for each rank that shows all micro-batches; the bubble and its formula; a figure of both steps."""
    wide = ("--width", 256, "--layers", 6, "--batch_size", 1200, "--epochs", 1)
    out = train("pipeline_parallel", *DIGITS, *wide, "--plot", tmp_path / "t.png", processes=2).stdout
    titles = re.findall(r"^GPipe, (\d) micro-batch(?:es)?: ([\d.]+) s, bubble ([\d.]+), .* = ([\d.]+)$", out, re.M)
    assert [(int(pieces), formula) for pieces, _, _, formula in titles] == [(8, "0.11"), (1, "0.50")]
    assert all(0 < float(waiting) < 1 for _, _, waiting, _ in titles)
    assert float(titles[1][2]) >= 0.45  # in one piece each rank waits for the other: at least half of the time
    rows = re.findall(r"^rank (\d) \|([a-h0-7.]+)\|$", out, re.M)
    assert [rank for rank, _ in rows] == ["0", "1"] * 2
    assert {len(row) for _, row in rows} == {COLUMNS}
    assert (rows[2][1][0], rows[2][1][-1]) == ("0", "a")  # one piece starts on rank 0 and its gradient ends there
    speed = float(re.search(r"^the first is ([\d.]+) times as fast as the second$", out, re.M)[1])
    assert speed == pytest.approx(float(titles[1][1]) / float(titles[0][1]), abs=0.02)
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_one_rank_has_nobody_to_take_turns_with():
    """Without torchrun a schedule for several ranks is GPipe, and the timeline says so."""
    out = run("pipeline_parallel", *DIGITS, "--batch_size", 120, "--epochs", 1, "--schedule", "Interleaved1F1B").stdout
    assert re.findall(r"^(\w+), (\d) micro-batch", out, re.M) == [("GPipe", "8"), ("GPipe", "1")]


def ideal(ranks, pieces):
    """Return the spans of GPipe with steps of one second."""
    forward = [Span(rank, "forward", i, rank + i, rank + i + 1) for rank in range(ranks) for i in range(pieces)]
    half = pieces + ranks - 1
    return forward + [
        Span(rank, "backward", i, half + ranks - 1 - rank + i, half + ranks - rank + i)
        for rank in range(ranks)
        for i in range(pieces)
    ]


@pytest.mark.parametrize(("ranks", "pieces"), [(1, 1), (2, 1), (2, 8), (3, 5), (4, 12)])
def test_the_bubble_of_an_ideal_pipeline_is_the_formula(ranks, pieces):
    """(p-1)/(m+p-1), and the step takes 2(m+p-1) seconds."""
    spans = ideal(ranks, pieces)
    assert duration(spans) == 2 * (pieces + ranks - 1)
    assert bubble(spans, ranks) == pytest.approx((ranks - 1) / (pieces + ranks - 1))


def test_the_timeline_as_text():
    """What fills more than half of a column is in it."""
    text = as_text([*ideal(2, 3), Span(0, "weights", 1, 3.0, 4.0)], ["a", "bb"])
    width = COLUMNS // 8
    assert text.splitlines()[0] == f"a |{''.join(sign * width for sign in '012B.abc')}|"
    assert text.splitlines()[1] == f"bb |{''.join(sign * width for sign in '.012abc.')}|"
    assert as_text([Span(0, "forward", 12, 0, 1), Span(0, "backward", 27, 1, 2)], ["x"])[3:-1] == "2" * 44 + "b" * 44


@pytest.mark.parametrize(("schedule", "whose"), [("1F1B", ""), ("Interleaved1F1B", "GPipe's ")])
def test_the_formula_is_of_a_stage_on_each_rank(schedule, whose, capsys):
    """With two stages on a rank the bubble is another, and it says so."""
    show({(schedule, 8): ideal(2, 8)}, ["rank 0", "rank 1"], None)
    title = f"{schedule}, 8 micro-batches: 18.0000 s, bubble 0.11, {whose}(p-1)/(m+p-1) = 0.11"
    assert capsys.readouterr().out.splitlines()[0] == title


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_the_timeline_of_one_process(model):
    """Both stages of model_parallel.py on the CPU: at no moment do both compute, and it says so."""
    wide = ("--width", 256, "--batch_size", 1200, "--epochs", 1, "--model", model)
    out = run("model_parallel", *DIGITS, *wide, "--pipelined").stdout
    rows = re.findall(r"^stage(\d) \|([a-d0-3.]+)\|$", out, re.M)
    assert [stage for stage, _ in rows] == ["1", "2"] * 2
    for (_, one), (_, other) in ((rows[0], rows[1]), (rows[2], rows[3])):
        both = [place for place, pair in enumerate(zip(one, other, strict=True)) if "." not in pair]
        assert not both, (one, other)
    assert set("0123abcd") <= set(rows[0][1])
    assert all(float(waiting) >= 0.5 for waiting in re.findall(r"bubble ([\d.]+)", out))
    assert "nothing can overlap" in out
    alone = run("model_parallel", *DIGITS, *wide).stdout
    assert len(re.findall(r"^stage", alone, re.M)) - 1 == 2  # "stage1 on cpu, ..." comes first
    assert "times as fast" not in alone


@pytest.mark.parametrize(("network", "layers"), [(MLP, 4), (CNN, 4)])
def test_cutting_a_model(network, layers):
    """The stages together are the model, share its weights and have about equally many layers."""
    model, images = network(), torch.randn(3, 1, 28, 28)
    for stages in range(1, layers + 1):
        parts = cut(model, stages)
        counts = [len(list(part.parameters())) // 2 for part in parts]
        assert sum(counts) == layers and max(counts) - min(counts) <= 1
        assert [id(weight) for part in parts for weight in part.parameters()] == [id(w) for w in model.parameters()]
        activations = images
        for part in parts:
            activations = part(activations)
        assert activations.equal(model(images))


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (5, (), ("5 stages need as many layers", "--layers 4")),
        (3, ("--model", "cnn", "--schedule", "Interleaved1F1B"), ("6 stages", "--layers 3")),
        (2, ("--micro_batches", 7), ("--batch_size 120 can't be cut into 7 micro-batches", "use 119")),
        (2, ("--schedule", "1F1B", "--micro_batches", 1), ("1F1B can't take 1 micro-batches", "--micro_batches 2")),
        (2, ("--schedule", "InterleavedZeroBubble", "--micro_batches", 1), ("--micro_batches 2",)),
        (4, ("--layers", 7, "--schedule", "Interleaved1F1B", "--micro_batches", 7), ("--micro_batches 8",)),
        (2, ("--schedule", "ZeroBubble"), ("invalid choice", "InterleavedZeroBubble")),
        (2, ("--plot", "/proc/x/t.png"), ("can't write --plot",)),
        (2, ("--plot", "t.docx"), ("--plot t.docx is of a format that can't be drawn", "use t.png")),
        (2, ("--micro_batches", 0), ("must be 1 or more",)),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert_one_line(main("pipeline_parallel", *DIGITS, "--batch_size", 120, *flags, env=env), words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--pipelined", "--micro_batches", 1000), ("128 images make 128 pieces at most", "use 128")),
        (("--devices", "cpu", "cuda:99"), ("--devices", "cuda:99", "choose from")),
        (("--micro_batches", 0), ("must be 1 or more",)),
    ],
)
def test_flags_of_one_process_that_cannot_work(flags, words, main):
    """The same for the lesson with two devices."""
    assert_one_line(main("model_parallel", *DIGITS, *flags), words)


def assert_one_line(done, words):
    """Check that one line was said, and that these words are in it."""
    assert len(done.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in done.stderr
