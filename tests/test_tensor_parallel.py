"""The tensor parallelism lesson: steps, messages, any module, and its exercises."""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, ROOT, epochs, fails, losses, one_line, single_gpu, train
from forked import in_group
from torch import nn

LESSON = "tensor_parallel"
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
COMPARED = r"^outputs differ from the whole model's by (\S+), gradients by (\S+)\n"
COUNTED = r"^all_reduce in forward: (\d+), in backward: (\d+) \(predicted: (\d+) and (\d+)\)$"


def compared(out):
    """Return what --compare prints: both differences, and the messages counted and predicted."""
    apart = re.search(COMPARED, out, re.M)
    counts = re.search(COUNTED, out, re.M)
    return [float(number) for number in apart.groups()], [int(count) for count in counts.groups()]


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
        ("hand", 3, ("--model", "cnn"), (1, 1)),  # convolutions come first, and need the gradient
        ("dtensor", 1, (), (0, 0)),  # a single rank sends nothing
        ("dtensor", 2, (), (2, 1)),
        ("dtensor", 3, ("--width", 66), (2, 1)),
        ("dtensor", 2, ("--model", "cnn", "--layers", 2), (1, 1)),
    ],
)
def test_a_step_is_that_of_the_whole_model(by, processes, flags, messages):
    """Outputs and gradients agree to 1e-12, and there are as many messages as predicted."""
    step = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--double", "--compare")
    out = train(LESSON, *step, "--by", by, *flags, processes=processes).stdout
    apart, counts = compared(out)
    assert max(apart) < 1e-12
    assert counts == [*messages, *messages]
    assert "several nodes" not in out


@pytest.mark.parametrize(
    ("by", "processes", "network"),
    [
        ("hand", 3, {"width": 66}),
        ("dtensor", 3, {"width": 66}),
        ("hand", 2, {"model": "cnn", "layers": 2}),
        ("dtensor", 2, {"model": "cnn", "layers": 2}),
    ],
)
def test_numbers_are_those_of_one_process(by, processes, network):
    """Other sizes than those of test_parity.py: the losses of single_gpu.py, to 1e-10."""
    flags = [*TWO_EPOCHS, "--double"]
    flags += [word for name, value in network.items() for word in (f"--{name}", value)]
    right = [line["loss"] for line in single_gpu(*flags)]
    done = train(LESSON, *flags, "--by", by, processes=processes)
    assert not done.stderr
    assert losses(done.stdout) == pytest.approx(right, abs=1e-10)


def test_ranks_on_several_nodes():
    """One line says that each pair of layers waits for the network."""
    out = train(LESSON, *TWO_EPOCHS, processes=2, env={"LOCAL_WORLD_SIZE": "1"}).stdout
    assert out.count("The ranks span several nodes") == 1


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (3, (), ("--width 64 cannot be divided by 3 processes", "use --width 63")),
        (7, ("--model", "cnn"), ("--width 120", "use --width 119")),
        (4, ("--width", 1), ("use --width 4",)),
        (2, ("--by", "magic"), ("invalid choice", "dtensor")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, *flags, env=env), *words)


def matrix(text, name):
    """Return the numbers that the docstring gives for a name, as in `x A0 = [1 2]`."""
    [found] = re.findall(rf"(?<!\w){re.escape(name)} = \[([\d ]+)\]", text)
    return [int(number) for number in found.split()]


def test_the_example_in_the_docstring():
    """Its numbers are those that PyTorch computes."""
    text = (ROOT / "playground" / f"{LESSON}.py").read_text().split('"""')[1]
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    a = torch.tensor([[1.0, 0, 2, 1], [0, 1, 1, 1]])
    b = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, 0]])
    g = torch.ones(2)
    a_parts = a.chunk(2, dim=1)
    b_parts = b.chunk(2, dim=0)
    for rank in range(2):
        hidden = x @ a_parts[rank]
        assert matrix(text, f"x A{rank}") == hidden.tolist()
        output = matrix(text, f"y{rank} = ReLU(x A{rank}) B{rank}")
        assert output == (hidden.relu() @ b_parts[rank]).tolist()
        gradient = g @ b_parts[rank].T
        assert matrix(text, f"g B{rank}.T") == gradient.tolist()
        shown = " ".join(f"{number:.0f}" for number in gradient.tolist())
        assert matrix(text, f"[{shown}] A{rank}.T") == (gradient @ a_parts[rank].T).tolist()
    y = (x @ a).relu() @ b
    assert f"y0 + y1 = [{y[0]:.0f} {y[1]:.0f}] = ReLU(x A) B" in text
    y.backward(g)
    assert f"[1 1] + [6 4] = [{x.grad[0]:.0f} {x.grad[1]:.0f}], the gradient of x" in text


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
    lesson.split_by_hand(model, PAIRS)
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
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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
    """Add must not overwrite the output of a sigmoid, from which its gradient is computed."""
    import tensor_parallel as lesson

    term = torch.tensor([0.3, -1.0], requires_grad=True)
    total = lesson.Add.apply(term.sigmoid())
    torch.testing.assert_close(total.detach(), 2 * term.sigmoid().detach())
    total.sum().backward()
    output = term.detach().sigmoid()
    torch.testing.assert_close(term.grad, output * (1 - output))
    inputs = torch.ones(2, 3, requires_grad=True)
    lesson.Copy.apply(inputs).t().sum().backward()  # this gradient is not contiguous
    assert inputs.grad.tolist() == [[2.0] * 3] * 2


def test_the_functions_at_the_ends_of_a_pair():
    """Autograd would not notice that all_reduce overwrites a tensor."""
    in_group(sum_after_sigmoid, 2)


def refuse(rank):
    """Sizes that cannot be divided, and parameters of several layers, are errors."""
    import tensor_parallel as lesson

    odd = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match="size 5 cannot be divided by 2 ranks"):
        lesson.split_by_hand(odd, [("0", "1")])
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    tied[2].weight = tied[0].weight
    with pytest.raises(ValueError, match="layers that share a parameter cannot be split"):
        lesson.split_by_hand(tied, [("0", "1")])


def test_what_cannot_be_split():
    """It is an error, and not a wrong result."""
    in_group(refuse, 2)


def test_without_the_sum_in_backward(change, right):
    """Exercise 1: outputs are right, gradients are not, and the second loss differs."""
    copied = change(LESSON, ("F.linear(Copy.apply(inputs), ", "F.linear(inputs, "))
    out = train(copied, *TWO_EPOCHS, "--compare", processes=2).stdout
    (outputs, gradients), counts = compared(out)
    assert outputs < 1e-6 and gradients > 1e-4
    assert counts == [2, 0, 2, 1]
    assert abs(losses(out)[1] - right[1]) > 1e-3


@pytest.mark.parametrize("by", ["hand", "dtensor"])
def test_other_parameters_on_each_rank(by, change, right):
    """Exercise 2: by hand the model has shards of both; DTensor takes rank 0's. No error."""
    seed = "    torch.manual_seed(args.seed{})\n    # NEW: the whole model"
    copied = change(LESSON, (seed.format(""), seed.format(" + rank")))
    out = train(copied, *TWO_EPOCHS, "--compare", "--by", by, processes=2).stdout
    (outputs, _), _ = compared(out)
    if by == "hand":
        assert outputs > 1e-2
        assert abs(losses(out)[1] - right[1]) > 1e-3
    else:
        assert outputs < 1e-6
        assert losses(out) == pytest.approx(right, abs=2e-4)


@pytest.mark.parametrize("by", ["hand", "dtensor"])
def test_other_images_on_each_rank(by, change, right):
    """Exercise 3: the ranks add up activations of different images, without an error."""
    copied = change(LESSON, ("set_epoch(epoch)", "set_epoch(epoch + rank)"))
    out = train(copied, *TWO_EPOCHS, "--by", by, "--compare", processes=2).stdout
    assert max(compared(out)[0]) < 1e-6
    assert losses(out)[1] > right[1] + 0.2


COLUMN = ("plan[column] =", 'plan[column + "x"] =')
ROW = ("plan[row] =", 'plan[row + "x"] =')


@pytest.mark.parametrize(
    ("pairs", "end"),
    [([COLUMN], "same reduction dim"), ([ROW], "shapes cannot be multiplied"), ([COLUMN, ROW], "")],
)
def test_a_plan_with_keys_that_no_layer_has(pairs, end, change):
    """Exercise 4: PyTorch warns. One layer without its partner is an error, two are none."""
    flags = (*TWO_EPOCHS, "--by", "dtensor", "--compare")
    copied = change(LESSON, *pairs)
    if end:
        told = fails(copied, *flags, processes=2)
        assert end in told
    else:
        done = train(copied, *flags, processes=2)
        told = done.stderr
        assert compared(done.stdout)[1] == [0, 0, 2, 1]
        assert len(epochs(done.stdout)) == 2
    assert re.search(r"UserWarning: Parallelize plan key '[13]x' could not be resolved", told)
