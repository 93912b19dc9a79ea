"""The tensor parallelism lesson: a step is the whole model's, by hand and by DTensor; messages; exercises."""

import re
import shutil

import pytest
import torch
from conftest import DIGITS, ROOT, epochs, single_gpu, train
from test_timeline import ONE_STEP, assert_one_line, reference

LESSON = "tensor_parallel"
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
COMPARED = r"^outputs differ from the whole model's by (\S+), gradients by (\S+)\n"
COUNTED = r"^all_reduce in forward: (\d+), in backward: (\d+)  \(predicted: (\d+) and (\d+), "


@pytest.fixture
def change(tmp_path):
    """Return a function that copies the lesson and what it imports, and replaces texts that are there once."""

    def changed(*pairs, lesson=LESSON):
        for folder in ("playground", "common"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        file = tmp_path / "playground" / f"{lesson}.py"
        doc, code = re.match(r'(""".*?""")(.*)', file.read_text(), re.S).groups()
        for old, new in pairs:
            assert code.count(old) == 1, f"{old!r} is there {code.count(old)} times"
            code = code.replace(old, new)
        file.write_text(doc + code)
        return file

    return changed


def compared(out):
    """Return what --compare prints: the differences of outputs and gradients, and messages counted and predicted."""
    apart, counts = re.search(COMPARED, out, re.M), re.search(COUNTED, out, re.M)
    return [float(number) for number in apart.groups()], [int(number) for number in counts.groups()]


def losses(out):
    """Return the losses of all epochs."""
    return [line["loss"] for line in epochs(out)]


def fails(copy, *flags, processes):
    """Run a copy, which must fail. Returns what its ranks said on stderr."""
    with pytest.raises(AssertionError) as failed:
        train(copy, *flags, processes=processes)
    return str(failed.value)


def assert_whole(path, network):
    """After ONE_STEP a checkpoint has all weights and Adam's averages, those of plain PyTorch, to 1e-12."""
    torch.set_default_dtype(torch.float64)
    try:
        names, gradients = reference(**network)
    finally:
        torch.set_default_dtype(torch.float32)
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint) == {"model", "optimizer", "epoch", "args"}
    assert list(checkpoint["model"]) == names
    for place, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
        state = checkpoint["optimizer"]["state"][place]
        assert state["step"] == 1
        assert checkpoint["model"][name].shape == state["exp_avg_sq"].shape == gradient.shape
        torch.testing.assert_close(state["exp_avg"] * 10, gradient, atol=1e-12, rtol=0)  # Adam's first average


@pytest.fixture
def right():
    """The losses of single_gpu.py."""
    return [line["loss"] for line in single_gpu(*TWO_EPOCHS)]


@pytest.mark.parametrize(
    ("by", "processes", "flags", "messages"),
    [
        ("hand", 1, (), (2, 1)),
        ("hand", 2, (), (2, 1)),
        ("hand", 3, ("--width", 66), (2, 1)),
        ("hand", 4, ("--layers", 5), (3, 2)),
        ("hand", 2, ("--layers", 2), (1, 0)),  # the third layer has no partner, and stays whole
        ("hand", 3, ("--model", "cnn"), (1, 1)),  # convolutions come before, and need the gradient
        ("dtensor", 1, (), (0, 0)),  # a rank that is alone sends nothing
        ("dtensor", 2, (), (2, 1)),
        ("dtensor", 3, ("--width", 66), (2, 1)),
        ("dtensor", 2, ("--model", "cnn", "--layers", 2), (1, 1)),
    ],
)
def test_a_step_is_that_of_the_whole_model(by, processes, flags, messages):
    """Outputs and gradients to 1e-12, as the lesson says, and as many messages as it predicts."""
    step = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--double", "--compare")
    apart, counts = compared(train(LESSON, *step, "--by", by, *flags, processes=processes).stdout)
    assert max(apart) < 1e-12
    assert counts == [*messages, *messages]


@pytest.mark.parametrize(
    ("by", "processes", "network"),
    [
        ("hand", 3, {"width": 66}),
        ("dtensor", 3, {"width": 66}),
        ("hand", 2, {"model": "cnn", "layers": 2}),
        ("dtensor", 2, {"model": "cnn", "layers": 2}),
    ],
)
def test_a_checkpoint_is_that_of_one_process(by, processes, network, tmp_path):
    """After a step with all images rank 0 has all weights and Adam's averages, those of plain PyTorch."""
    flags = [word for name, value in network.items() for word in (f"--{name}", value)]
    train(LESSON, *ONE_STEP, *flags, "--by", by, "-s", tmp_path / "c.pt", processes=processes)
    assert_whole(tmp_path / "c.pt", network)


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (3, (), ("--width 64 can't be shared by 3 processes", "use --width 63")),
        (7, ("--model", "cnn"), ("--width 120", "use --width 119")),
        (4, ("--width", 1), ("use --width 4",)),
        (2, ("--by", "magic"), ("invalid choice", "dtensor")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    assert_one_line(main(LESSON, *DIGITS, *flags, env=env), words)


def test_without_the_sum_in_backward(change, right):
    """Exercise 1: outputs are right, gradients are not, and training goes another way."""
    copy = change(("            inputs[0].register_hook(add_up)", "            pass"))
    out = train(copy, *TWO_EPOCHS, "--compare", processes=2).stdout
    (outputs, gradients), counts = compared(out)
    assert outputs < 1e-6 and gradients > 1e-4
    assert counts == [2, 0, 2, 1]
    assert abs(losses(out)[1] - right[1]) > 1e-3


@pytest.mark.parametrize("by", ["hand", "dtensor"])
def test_other_weights_on_each_rank(by, change, right):
    """Exercise 2: by hand a model is stitched from both; DTensor takes rank 0's. Neither complains."""
    seed = "    torch.manual_seed(args.seed{})\n    train_set"
    copy = change((seed.format(""), seed.format(" + rank")))
    out = train(copy, *TWO_EPOCHS, "--compare", "--by", by, processes=2).stdout
    (outputs, _), _ = compared(out)
    if by == "hand":
        assert outputs > 1e-2
        assert abs(losses(out)[1] - right[1]) > 1e-3
    else:
        assert outputs < 1e-6
        assert losses(out) == pytest.approx(right, abs=2e-4)


@pytest.mark.parametrize("by", ["hand", "dtensor"])
def test_other_images_on_each_rank(by, change, right):
    """Exercise 2: sums of different images' activations, and nobody complains."""
    copy = change(("order.manual_seed(args.seed + epoch)", "order.manual_seed(args.seed + epoch + rank)"))
    found = losses(train(copy, *TWO_EPOCHS, "--by", by, processes=2).stdout)
    assert found[1] > right[1] + 0.2


@pytest.mark.parametrize(
    ("plan", "end"),
    [
        ('{column + "x": ColwiseParallel(), row: RowwiseParallel()}', "same reduction dim"),
        ('{column: ColwiseParallel(), row + "x": RowwiseParallel()}', "shapes cannot be multiplied"),
        ('{column + "x": ColwiseParallel(), row + "x": RowwiseParallel()}', "predicted: 2 and 1"),
    ],
)
def test_a_plan_that_names_no_layer(plan, end, change):
    """Exercise 3: a guard rail makes PyTorch's warning an error, in one line. Without it ranks go on, to where it says.

    A layer and its partner don't fit together; with two wrong keys nothing is cut.
    """
    copy = change(("{column: ColwiseParallel(), row: RowwiseParallel()}", plan))
    flags = (*TWO_EPOCHS, "--by", "dtensor", "--compare")
    told = re.findall(r"^ *(error: .*)", fails(copy, *flags, processes=2), re.M)  # pytest indents it
    advice = "name the layers as model.named_modules() does"
    said = r"error: Parallelize plan key '[13]x' could not be resolved: no submodule matching token '[13]x': "
    assert re.fullmatch(said + re.escape(advice), told[0])

    rails = copy.parents[1] / "common" / "guard_rails.py"
    [line] = re.findall('^warnings.filterwarnings\\("error", "Parallelize.*\n', rails.read_text(), re.M)
    rails.write_text(rails.read_text().replace(line, ""))
    if "predicted" not in end:
        assert end in fails(copy, *flags, processes=2)
    else:
        out = train(copy, *flags, processes=2).stdout
        assert compared(out)[1] == [0, 0, 2, 1]
        assert len(epochs(out)) == 2
