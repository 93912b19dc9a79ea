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


@pytest.mark.parametrize(
    ("by", "network", "keeps"),
    [
        ("hand", (), 29_642),  # as the docstring says
        ("dtensor", (), 29_642),
        ("hand", ("--model", "cnn", "--layers", 2), None),  # a third linear layer stays whole
    ],
)
def test_numbers_are_those_of_one_process(by, network, keeps):
    """The losses of single_gpu.py, to 1e-10, and the parameters that a rank keeps."""
    flags = (*TWO_EPOCHS, *network)
    done = train(LESSON, *flags, "--by", by, processes=2)
    assert not done.stderr
    right = [line["loss"] for line in single_gpu(*flags)]
    assert losses(done.stdout) == pytest.approx(right, abs=1e-10)
    first, second = kept(done.stdout)
    assert first == second
    assert keeps in (None, first)


MESSAGES = [  # in forward(), and in backward()
    (MLP(16), 2, 1),  # the first pair needs no gradient of the images
    (MLP(16, layers=5), 3, 2),
    (CNN(16), 1, 1),  # convolutions come first, and need the gradient
]


def count_messages(rank):
    """Count the all_reduces of a step, in which the images need no gradient."""
    import tensor_parallel as lesson

    for model, in_forward, in_backward in copy.deepcopy(MESSAGES):
        lesson.split(model, lesson.find_pairs(model))
        with Messages() as forward:
            output = model(torch.ones(2, 1, 28, 28))
        with Messages() as backward:
            output.sum().backward()
        assert [message.kind for message in forward.noted] == ["all_reduce"] * in_forward
        assert [message.kind for message in backward.noted] == ["all_reduce"] * in_backward


def test_two_messages_for_a_pair():
    """An all_reduce in forward() and one in backward(), where the input needs a gradient."""
    in_group(count_messages, 2)


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (3, (), ("3 ranks cannot split --width 64: use 63",)),
        (7, ("--model", "cnn"), ("--width 120", "use 119")),
        (2, ("--model", "transformer"), ("sequence_parallel.py", "use --model mlp or cnn")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, *flags, env=env), *words)


def test_the_example_in_the_docstring():
    """Its numbers are those that PyTorch computes, and ReLU changes one of them."""
    x = torch.tensor([1, 2])
    a = torch.tensor([[1, 0, 2, 1], [0, 1, 1, -2]])
    b = torch.tensor([[1, 0], [0, 1], [1, 1], [2, 0]])
    hidden = x @ a
    terms = [hidden[:2].relu() @ b[:2], hidden[2:].relu() @ b[2:]]
    assert hidden.tolist() == [1, 2, 4, -3]
    assert [term.tolist() for term in terms] == [[1, 2], [4, 4]]
    assert sum(terms).tolist() == (hidden.relu() @ b).tolist() == [5, 6]
    text = lesson_path(LESSON).read_text()
    for row in [*a.tolist(), *b.tolist()]:
        numbers = row if len(row) == 2 else [*row[:2], "|", row[2], f"{row[3]:2}"]
        assert f"[{' '.join(map(str, numbers))}]" in text
    for shown in ("ReLU([1  2]) B0 = [1 2]", "ReLU([4 -3]) B1 = [4 4]", "y = [5 6]"):
        assert shown in text


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
DIMS = {"first.weight": 0, "first.bias": 0, "second.weight": 1}  # along which a pair is split
DIMS |= {"third.weight": 0, "third.bias": 0, "fourth.weight": 1}


def three_steps(model):
    """Train a model for three steps, the same ones in each process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        images = torch.randn(7, 6, generator=generator, dtype=torch.float64)
        model(images).square().sum().backward()
        optimizer.step()


def train_by_hand(rank):
    """Train a whole model and one that is split, and compare the parameters and buffers."""
    import tensor_parallel as lesson

    torch.manual_seed(0)
    whole = Several().double()
    model = copy.deepcopy(whole)
    lesson.split(model, PAIRS)
    three_steps(whole)
    three_steps(model)
    state = model.state_dict()
    assert list(state) == list(whole.state_dict())
    for key, right in whole.state_dict().items():
        if key in DIMS:
            right = right.chunk(dist.get_world_size(), DIMS[key])[rank]
        torch.testing.assert_close(state[key], right, atol=1e-12, rtol=0)
    without = {key for key, value in model.named_parameters() if value.grad is None}
    assert without == {"first.weight", "fourth.bias", "unused.weight", "unused.bias"}


def test_any_module():
    """Biases or none, frozen, tied and unused parameters, and buffers, to 1e-12.

    The functions inside and behind a pair use their outputs in their backward passes.
    """
    in_group(train_by_hand, 3)


def ends_of_a_pair(rank):
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
    odd = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match="2 ranks cannot split a dimension of 5"):
        lesson.split(odd, [("0", "1")])
    pair = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    lesson.split(pair, [("0", "2")])
    with torch.autocast("cpu", torch.bfloat16):
        assert pair(torch.ones(2, 4)).dtype == torch.bfloat16  # as that of a whole pair


def test_the_functions_at_the_ends_of_a_pair():
    """Autograd would not notice an overwritten tensor. What cannot be split is an error."""
    in_group(ends_of_a_pair, 2)


CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
STEP = "            optimizer.step()\n"


def test_clipping(change):
    """By hand the norm is one rank's, as the docstring says. With DTensor it is the model's."""
    pair = (STEP, CLIP + STEP)
    expected = losses(train(change("single_gpu", pair), *TWO_EPOCHS).stdout)
    copied = change(LESSON, pair)
    by_hand = losses(train(copied, *TWO_EPOCHS, processes=2).stdout)
    assert abs(by_hand[1] - expected[1]) > 1e-3
    by_dtensor = losses(train(copied, *TWO_EPOCHS, "--by", "dtensor", processes=2).stdout)
    assert by_dtensor == pytest.approx(expected, abs=1e-10)


OWN_GRADIENT = ("F.linear(AddGradients.apply(inputs), ", "F.linear(inputs, ")
SEED = "torch.manual_seed(args.seed{})\n    model = "
OTHER_PARAMETERS = (SEED.format(""), SEED.format(" + rank"))
OTHER_IMAGES = ("set_epoch(epoch)", "set_epoch(epoch + rank)")


@pytest.mark.parametrize(
    ("pair", "by", "second"),
    [
        (OWN_GRADIENT, "hand", 1.5168),  # 1
        (OTHER_PARAMETERS, "hand", 1.4322),  # 2: shards of two models
        (OTHER_PARAMETERS, "dtensor", 1.4064),  # takes those of rank 0, so nothing changes
        (OTHER_IMAGES, "hand", 2.04),  # 3
        (OTHER_IMAGES, "dtensor", 2.04),
    ],
)
def test_wrong_without_an_error(pair, by, second, change):
    """The first three exercises: the second losses are those of the answers."""
    done = train(change(LESSON, pair), *TWO_EPOCHS, "--by", by, processes=2)
    digits = len(str(second).partition(".")[2])
    assert round(losses(done.stdout)[1], digits) == second


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
