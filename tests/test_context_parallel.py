"""The context parallelism lesson: attention, steps, costs, refusals, and its exercises."""

import argparse
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, ROOT, epochs, one_line, one_process, ranks, single_gpu, train
from forked import in_group
from torch.nn import functional as F

LESSON = "context_parallel"
STEP = (*DIGITS, "--batch_size", 750, "--width", 16, "--epochs", 1, "--compare")
TRANSFORMER = ("--model", "transformer")
DOCSTRING = (ROOT / "playground" / f"{LESSON}.py").read_text().split('"""')[1]


def interleaved(tokens, world_size):
    """Return the places of tokens that are dealt out like cards."""
    return [torch.arange(tokens)[rank::world_size] for rank in range(world_size)]


def attend(rank, path):
    """Compare attention and its gradients with PyTorch's, for several places of the tokens."""
    import context_parallel as lesson

    world_size = dist.get_world_size()
    for tokens in (4, 13, 28):
        for order in (lesson.plain, lesson.zigzag, interleaved):
            places = order(tokens, world_size)
            assert torch.cat(places).sort()[0].tolist() == list(range(tokens))
            for name, attention in lesson.ATTENTION.items():
                if name == "ulysses" and world_size == 3:
                    continue
                compare_attention(attention, places, tokens)
    (path / f"rank{rank}").touch()


def compare_attention(attention, places, tokens):
    """Compare the attention of this rank's tokens with PyTorch's, of all tokens."""
    mine = places[dist.get_rank()]
    torch.manual_seed(0)
    inputs = [torch.randn(2, tokens, 4, 3, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    inputs[0] *= 2000  # exp() of such scores overflows
    gradient = torch.randn(2, tokens, 4, 3, dtype=torch.float64).transpose(1, 2)
    for each in inputs:
        each.requires_grad_()
    read = F.scaled_dot_product_attention(*inputs, is_causal=True)
    read.backward(gradient)
    own = [each.detach()[:, :, mine].requires_grad_() for each in inputs]
    found = attention(*own, places, dist.group.WORLD)
    found.backward(gradient[:, :, mine])
    close = partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)
    close(found, read[:, :, mine])
    for each, whole in zip(own, inputs, strict=True):
        close(each.grad, whole.grad[:, :, mine])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_attention_is_that_of_one_process(world_size, tmp_path):
    """Any number of tokens on a rank, in any places: forward and backward, with large scores."""
    in_group(attend, world_size, tmp_path)
    assert len(list(tmp_path.iterdir())) == world_size


def costs(out):
    """Return what --compare prints.

    Returns:
        how far gradients are apart, the rows of the ranks and of one process (tokens, pairs, bytes
        kept), and for each kind of message four numbers: counted, predicted, sent, predicted.
    """
    apart = float(re.search(r"^gradients differ from the whole model's by (\S+)$", out, re.M)[1])
    rows = []
    for row in re.findall(r"^(?:rank \d|one process) +(.*) bytes$", out, re.M):
        rows.append([int(number.replace(",", "")) for number in row.split()])
    messages = {}
    for kind, row in re.findall(r"^(send|all_to_all|all_reduce) +(\d.*)$", out, re.M):
        messages[kind] = [int(number.replace(",", "")) for number in row.split()]
    return apart, rows, messages


def pairs_of(order, tokens, world_size):
    """Return how many pairs of tokens each rank computes, by the rule of visible()."""
    import context_parallel as lesson

    places = lesson.ORDERS[order](tokens, world_size)
    counts = []
    for mine in places:
        pairs = 0
        for theirs in places:
            looking = [place for place in mine if place >= theirs[0]]
            pairs += len(looking) * len([place for place in theirs if place <= mine[-1]])
        counts.append(pairs)
    return counts


@pytest.mark.parametrize(
    ("by", "order", "processes"),
    [
        ("ring", "zigzag", 1),
        ("ring", "zigzag", 2),
        ("ring", "plain", 3),
        ("ring", "zigzag", 4),
        ("ulysses", "zigzag", 2),
        ("ulysses", "plain", 4),
    ],
)
def test_a_step_is_that_of_one_process(by, order, processes):
    """Losses to 1e-10, gradients to 1e-12; messages, pairs and bytes as predicted."""
    flags = (*STEP, "--double", "--by", by, "--order", order)
    done = train(LESSON, *flags, processes=processes)
    assert not done.stderr
    lines = one_process(*STEP[:-1], *TRANSFORMER, "--double", apart=1e-10)
    assert epochs(done.stdout) == lines
    apart, rows, messages = costs(done.stdout)
    assert apart < 1e-12
    assert len(messages) == 2
    for counted, predicted, sent, predicted_bytes in messages.values():
        assert (counted, sent) == (predicted, predicted_bytes)
    *of_ranks, (tokens, needed, whole_bytes) = rows
    assert (tokens, needed) == (28, 28 * 29 // 2)
    assert sum(row[0] for row in of_ranks) == 28
    pairs = [row[1] for row in of_ranks]
    if by == "ring":
        assert pairs == pairs_of(order, 28, processes)
    else:
        assert pairs == [28 * 28 // processes] * processes
    kept = sum(row[2] for row in of_ranks)
    assert whole_bytes * 0.99 < kept < whole_bytes * 1.08


def long_sequence(rank, path):
    """Let --compare count with 784 tokens, and keep what it prints."""
    import contextlib

    import context_parallel as lesson

    flags = {"model": "transformer", "width": None, "layers": None, "heads": None}
    args = argparse.Namespace(tokens=784, double=False, **flags)
    whole_model = lesson.make_model(args)
    model = lesson.make_model(args)
    model.load_state_dict(whole_model.state_dict())
    places = lesson.zigzag(784, 4)
    lesson.split_tokens(model, lesson.RingAttention.apply, places, dist.group.WORLD)
    step = partial(lesson.compute_gradients, model, has_last=rank == 0)
    batch = torch.randn(12, 1, 28, 28), torch.randint(10, (12,))
    dist.broadcast(batch[0], src=0)
    dist.broadcast(batch[1], src=0)
    with open(path / f"rank{rank}", "w") as file, contextlib.redirect_stdout(file):
        lesson.compare_sequence(step, model, whole_model, batch, places, "ring")


def test_a_long_sequence(tmp_path):
    """With 784 tokens, each of four ranks keeps a fourth of the bytes of one process."""
    in_group(long_sequence, 4, tmp_path)
    _, rows, messages = costs((tmp_path / "rank0").read_text())
    *of_ranks, (_, _, whole_bytes) = rows
    assert [row[:2] for row in of_ranks] == [[196, 96_040]] * 4  # 2.5 blocks of 196 x 196 pairs
    for _, _, kept in of_ranks:
        assert 4 * kept == pytest.approx(whole_bytes, rel=1e-3)
    assert messages["send"][0] == messages["send"][1]
    assert messages["send"][2] == messages["send"][3]


def test_the_example_in_the_docstring():
    """Its numbers are those of attention, with powers of two."""
    scores = torch.tensor([1.0, 1, 2, 2])
    values = torch.tensor([6.0, 0, 3, 6])
    assert "scores of a token [1 1 | 2 2]    values [6 0 | 3 6]" in DOCSTRING
    total = 0
    read = 0
    maximum = scores.new_tensor(-torch.inf)
    for block in (slice(0, 2), slice(2, 4)):
        larger = torch.maximum(maximum, scores[block].max())
        weights = 2 ** (scores[block] - larger)
        shrink = 2 ** (maximum - larger)
        total = total * shrink + weights.sum()
        read = read * shrink + weights @ values[block]
        maximum = larger
        assert weights.tolist() == [1, 1]
        shown = f"total {total:.0f}, read {read:.0f}"
        assert shown in DOCSTRING or f"1 + 2 = {total:.0f}, read 3 + 9 = {read:.0f}" in DOCSTRING
    mean = (2**scores @ values) / (2**scores).sum()
    assert read / total == mean == 4
    assert f"the mean is {read:.0f} / {total:.0f} = {mean:.0f}" in DOCSTRING


@pytest.mark.parametrize(
    ("processes", "flags", "words"),
    [
        (2, ("--model", "mlp"), ("--model mlp has no tokens", "use --model transformer")),
        (8, ("--tokens", 4), ("--tokens 4: 8 processes need at least 8",)),
        (3, ("--by", "ulysses"), ("--heads 4: 3 processes cannot split them", "use --by ring")),
        (2, ("--order", "random"), ("invalid choice", "zigzag")),
    ],
)
def test_flags_that_cannot_work(processes, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{processes}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, *flags, env=env), *words)


def loss_of(out):
    """Return the loss of the only epoch."""
    [line] = epochs(out)
    return line["loss"]


@pytest.fixture
def right():
    """The loss of one process."""
    [line] = single_gpu(*STEP[:-1], *TRANSFORMER)
    return line["loss"]


SUM = "        dist.all_reduce(parameter.grad)\n"


def test_divided_by_the_number_of_ranks(change, right):
    """Exercise 1: gradients are 1/n of the right ones, and Adam hides it."""
    copied = change(LESSON, (SUM, f"{SUM}        parameter.grad /= dist.get_world_size()\n"))
    out = train(copied, *STEP, processes=2).stdout
    assert costs(out)[0] > 1e-3
    assert loss_of(out) == pytest.approx(right, abs=1e-3)


def test_a_loss_on_each_rank(change, right):
    """Exercise 2: no error, and a token in the middle of the image gives a class, too."""
    copied = change(LESSON, ("        loss = loss * 0\n", "        pass\n"))
    out = train(copied, *STEP, processes=2).stdout
    assert costs(out)[0] > 1e-2
    assert abs(loss_of(out) - right) > 1e-3


def test_backward_on_one_rank(change):
    """Exercise 3: rank 1 has no gradients and fails, and rank 0 waits for it in the ring."""
    copied = change(LESSON, ("    loss.backward()", "    if has_last:\n        loss.backward()"))
    first, second = [job.wait() for job in ranks(copied, *STEP, "--timeout", 5, processes=2)]
    assert first.returncode == second.returncode == 1
    assert "but got <class 'NoneType'>" in second.stderr
    assert "rank 0 waited at context_parallel.py" in first.stderr
