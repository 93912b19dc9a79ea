"""The tensor parallelism lesson: its numbers, its messages, any module, and its exercises."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, fails, lesson_path, losses, one_line, single_gpu, train
from forked import in_group
from torch import nn

from common.models import CNN, MLP
from figures.messages import Messages

LESSON = "tensor_parallel"
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2, "--double")
KEPT = r"^rank \d keeps ([\d,]+) parameters$"


def kept(out):
    """Return how many parameters each rank has printed that it keeps."""
    return [int(number.replace(",", "")) for number in re.findall(KEPT, out, re.M)]


@pytest.fixture
def right():
    """The losses of single_gpu.py."""
    return [line["loss"] for line in single_gpu(*TWO_EPOCHS)]


@pytest.mark.parametrize(
    ("by", "processes", "network", "keeps"),
    [
        ("dtensor", 2, {}, 29_642),  # as the docstring says
        ("hand", 3, {"width": 66}, None),
        ("hand", 2, {"layers": 2}, None),  # the third layer has no partner, and stays whole
        ("dtensor", 2, {"model": "cnn", "layers": 2}, None),
    ],
)
def test_numbers_are_those_of_one_process(by, processes, network, keeps):
    """Other sizes than those of test_parity.py: the losses of single_gpu.py, to 1e-10."""
    flags = [*TWO_EPOCHS]
    flags += [word for name, value in network.items() for word in (f"--{name}", value)]
    right = [line["loss"] for line in single_gpu(*flags)]
    done = train(LESSON, *flags, "--by", by, processes=processes)
    assert not done.stderr
    assert losses(done.stdout) == pytest.approx(right, abs=1e-10)
    shown = kept(done.stdout)
    assert len(shown) == processes and len(set(shown)) == 1
    if keeps:
        assert shown[0] == keeps


def count_messages(rank, model, in_forward, in_backward):
    """Count the all_reduces of a step, in which the images need no gradient."""
    import tensor_parallel as lesson

    model = copy.deepcopy(model)
    lesson.split(model, lesson.find_pairs(model))
    with Messages() as forward:
        output = model(torch.ones(2, 1, 28, 28))
    with Messages() as backward:
        output.sum().backward()
    assert [message.kind for message in forward.noted] == ["all_reduce"] * in_forward
    assert [message.kind for message in backward.noted] == ["all_reduce"] * in_backward


@pytest.mark.parametrize(
    ("model", "messages"),
    [
        (MLP(16), (2, 1)),  # the first pair needs no gradient of the images
        (MLP(16, layers=5), (3, 2)),
        (MLP(16, layers=2), (1, 0)),
        (CNN(16), (1, 1)),  # convolutions come first, and need the gradient
    ],
)
def test_two_messages_for_a_pair(model, messages):
    """An all_reduce in forward() and one in backward(), where the input needs a gradient."""
    in_group(count_messages, 2, model, *messages)


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (3, (), ("3 ranks cannot split --width 64: use 63",)),
        (7, ("--model", "cnn"), ("--width 120", "use 119")),
        (4, ("--width", 1), ("use 4",)),
        (2, ("--model", "transformer"), ("sequence_parallel.py", "use --model mlp or cnn")),
        (2, ("--by", "magic"), ("invalid choice", "dtensor")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, *flags, env=env), *words)


def test_the_example_in_the_docstring():
    """Its numbers are those that PyTorch computes, and ReLU changes one of them."""
    text = lesson_path(LESSON).read_text().split('"""')[1]
    x = torch.tensor([1, 2])
    a = torch.tensor([[1, 0, 2, 1], [0, 1, 1, -2]])
    b = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 0]])

    def shown(tensor):
        """Return the numbers of a row, as in the docstring."""
        return "[" + " ".join(f"{number:2}" for number in tensor.tolist()) + "]"

    assert all(f"[{row[0]} {row[1]} | {row[2]} {row[3]:2}]" in text for row in a.tolist())
    assert all(f"[{row[0]} {row[1]}]" in text for row in b.tolist())
    assert (x @ a).min() < 0
    for rank, (columns, rows) in enumerate(zip(a.chunk(2, 1), b.chunk(2), strict=True)):
        hidden = x @ columns
        term = hidden.relu() @ rows
        in_text = shown(hidden).replace("[ ", "[")
        assert f"ReLU({in_text}) B{rank} = [{term[0]} {term[1]}]" in text
    y = (x @ a).relu() @ b
    assert re.search(rf"all_reduce: +y = \[{y[0]} {y[1]}\]", text)


class Several(nn.Module):
    """Layers of many kinds around, inside and between two pairs."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)  # it has buffers
        self.first = nn.Linear(6, 12)
        self.second = nn.Linear(12, 8, bias=False)
        self.third = nn.Linear(8, 24, bias=False)
        self.fourth = nn.Linear(24, 5)
        self.last = nn.Linear(5, 3)  # it has no partner
        self.unused = nn.Linear(2, 2)  # it gets no gradient
        self.also_last = nn.Linear(5, 3)
        self.also_last.weight = self.last.weight  # one parameter for two layers
        self.first.weight.requires_grad_(False)
        self.fourth.bias.requires_grad_(False)

    def forward(self, inputs):
        """Return (B, 3) for (B, 6)."""
        inputs = self.norm(inputs)
        hidden = self.second(self.first(inputs).sigmoid())
        hidden.tanh_()  # in place, and its backward pass uses its output
        outputs = self.fourth(self.third(hidden).exp()).sigmoid()
        return self.last(outputs) + self.also_last(outputs.t().contiguous().t())


PAIRS = [("first", "second"), ("third", "fourth")]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, amsgrad=True),
}


def three_steps(model, optimizer):
    """Train a model for three steps, the same ones in each process."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        images = torch.randn(7, 6, generator=generator, dtype=torch.float64)
        model(images).square().sum().backward()
        optimizer.step()


DIMS = {"first.weight": 0, "first.bias": 0, "second.weight": 1}  # of a pair, by hand
DIMS |= {"third.weight": 0, "third.bias": 0, "fourth.weight": 1}


def whole(tensor, dim):
    """Return a tensor that is split along a dimension, or along none, as a whole."""
    if dim is None:
        return tensor
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, tensor)
    return torch.cat(shards, dim)


def whole_state(model, optimizer):
    """Return the state of a model that is split by hand, and of its optimizer, as one process's."""
    state = {"model": {}, "optimizer": optimizer.state_dict()}
    for name, tensor in model.state_dict().items():
        state["model"][name] = whole(tensor, DIMS.get(name))
    parameters = list(model.named_parameters())  # the optimizer numbers them in this order
    for number, tensors in state["optimizer"]["state"].items():
        name, parameter = parameters[number]
        for key, tensor in tensors.items():
            dim = DIMS.get(name) if tensor.shape == parameter.shape else None
            tensors[key] = whole(tensor, dim)
    return state


def train_by_hand(rank, model, name, path):
    """Split a model, train it, check what only a rank sees, and save it as a whole."""
    import tensor_parallel as lesson

    model = copy.deepcopy(model)  # the ranks get the same memory
    lesson.split(model, PAIRS)
    optimizer = OPTIMIZERS[name](model.parameters())
    three_steps(model, optimizer)
    assert model.first.weight.shape == (12 // dist.get_world_size(), 6)
    assert model.third.bias is None and model.second.bias is None
    gradients = {key for key, value in model.named_parameters() if value.grad is not None}
    frozen = {"first.weight", "fourth.bias", "unused.weight", "unused.bias"}
    assert gradients == {key for key, _ in model.named_parameters()} - frozen
    assert not model.first.weight.requires_grad and not model.fourth.bias.requires_grad
    state = whole_state(model, optimizer)
    if rank == 0:
        torch.save(state, path)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_any_module(name, world_size, tmp_path):
    """Biases or none, frozen, tied and unused parameters, buffers, other optimizers: to 1e-12.

    The functions inside and behind a pair use their outputs in their backward passes.
    """
    torch.manual_seed(0)
    model = Several().double()
    path = tmp_path / "c.pt"
    in_group(train_by_hand, world_size, model, name, path)
    optimizer = OPTIMIZERS[name](model.parameters())
    three_steps(model, optimizer)
    checkpoint = torch.load(path, weights_only=True)
    expected = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert list(checkpoint["model"]) == list(expected["model"])
    for key in ("model", "optimizer"):
        torch.testing.assert_close(checkpoint[key], expected[key], atol=1e-12, rtol=0)


def sum_after_sigmoid(rank):
    """AddTerms must not overwrite a sigmoid's output, from which its gradient is computed."""
    import tensor_parallel as lesson

    term = torch.tensor([0.3, -1.0], requires_grad=True)
    total = lesson.AddTerms.apply(term.sigmoid())
    torch.testing.assert_close(total.detach(), 2 * term.sigmoid().detach())
    total.sum().backward()
    output = term.detach().sigmoid()
    torch.testing.assert_close(term.grad, output * (1 - output))
    inputs = torch.ones(2, 3, requires_grad=True)
    lesson.AddGradients.apply(inputs).t().sum().backward()  # this gradient is not contiguous
    assert inputs.grad.tolist() == [[2.0] * 3] * 2


def test_the_functions_at_the_ends_of_a_pair():
    """Autograd would not notice that all_reduce overwrites a tensor."""
    in_group(sum_after_sigmoid, 2)


def refuse(rank):
    """A size that cannot be divided is an error."""
    import tensor_parallel as lesson

    odd = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match="2 ranks cannot split a dimension of 5"):
        lesson.split(odd, [("0", "1")])


def test_what_cannot_be_split():
    """It is an error, and not a wrong result."""
    in_group(refuse, 2)


def step_with_autocast(rank):
    """Compare a pair's output and gradients with those of the whole pair, all with autocast."""
    import tensor_parallel as lesson

    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    parts = copy.deepcopy(whole)
    lesson.split(parts, [("0", "2")])
    outputs = []
    for model in (whole, parts):
        inputs = torch.linspace(-1, 1, 24).view(3, 8).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
        output.float().sum().backward()
        outputs += [output, inputs.grad]
    assert outputs[2].dtype == outputs[0].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[2], outputs[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(outputs[3], outputs[1], atol=0.02, rtol=0.02)
    assert parts[2].bias.grad.dtype == torch.float32


def test_autocast():
    """A split pair returns what a whole pair returns: bfloat16."""
    in_group(step_with_autocast, 2)


CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
STEP = "            optimizer.step()\n"


@pytest.mark.parametrize("by", ["hand", "dtensor"])
def test_clipping(by, change):
    """By hand the norm is one rank's, as the docstring says. With DTensor it is the model's."""
    pair = (STEP, CLIP + STEP)
    expected = losses(train(change("single_gpu", pair), *TWO_EPOCHS).stdout)
    found = losses(train(change(LESSON, pair), *TWO_EPOCHS, "--by", by, processes=2).stdout)
    if by == "hand":
        assert abs(found[1] - expected[1]) > 1e-3
    else:
        assert found == pytest.approx(expected, abs=1e-10)


def test_without_the_sum_in_backward(change, right):
    """Exercise 1: the loss of the first step is right, gradients are not, the loss differs."""
    copied = change(LESSON, ("F.linear(AddGradients.apply(inputs), ", "F.linear(inputs, "))
    found = losses(train(copied, *TWO_EPOCHS, processes=2).stdout)
    assert abs(found[1] - right[1]) > 1e-3


@pytest.mark.parametrize("by", ["hand", "dtensor"])
def test_other_parameters_on_each_rank(by, change, right):
    """Exercise 2: by hand the model has shards of both; DTensor takes rank 0's. No error."""
    seed = "torch.manual_seed(args.seed{})\n    model = "
    copied = change(LESSON, (seed.format(""), seed.format(" + rank")))
    found = losses(train(copied, *TWO_EPOCHS, "--by", by, processes=2).stdout)
    if by == "hand":
        assert abs(found[1] - right[1]) > 1e-3
    else:
        assert found == pytest.approx(right, abs=1e-10)


@pytest.mark.parametrize("by", ["hand", "dtensor"])
def test_other_images_on_each_rank(by, change, right):
    """Exercise 3: the ranks add up activations of different images, without an error."""
    copied = change(LESSON, ("set_epoch(epoch)", "set_epoch(epoch + rank)"))
    found = losses(train(copied, *TWO_EPOCHS, "--by", by, processes=2).stdout)
    assert found[1] > right[1] + 0.2


FIRST = ("plan[first] =", 'plan[first + "x"] =')
SECOND = ("plan[second] =", 'plan[second + "x"] =')


@pytest.mark.parametrize(
    ("pairs", "end"),
    [
        ([FIRST], "same reduction dim"),
        ([SECOND], "shapes cannot be multiplied"),
        ([FIRST, SECOND], ""),
    ],
)
def test_a_plan_with_keys_that_no_layer_has(pairs, end, change):
    """Exercise 4: PyTorch warns. One layer without its partner is an error, two are none."""
    flags = (*TWO_EPOCHS, "--by", "dtensor")
    copied = change(LESSON, *pairs)
    if end:
        told = fails(copied, *flags, processes=2)
        assert end in told
    else:
        done = train(copied, *flags, processes=2)
        told = done.stderr
        assert kept(done.stdout) == [59_210, 59_210]
        assert len(epochs(done.stdout)) == 2
    assert re.search(r"UserWarning: Parallelize plan key '[13]x' could not be resolved", told)
