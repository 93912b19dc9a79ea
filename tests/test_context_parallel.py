"""The context parallelism lesson: attention, gradients, messages, bytes, and its exercises."""

import argparse
import contextlib
import copy
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, ROOT, lesson_path, losses, one_line, ranks, single_gpu, train
from forked import in_group
from torch.nn import functional as F

from common.models import Transformer
from figures.messages import Messages

LESSON = "context_parallel"
TRANSFORMER = ("--model", "transformer", "--double")
STEPS = (*DIGITS, "--batch_size", 120, "--epochs", 1, *TRANSFORMER)
SMALL = ("--tokens", 14, "--width", 8, "--layers", 1)
ROW = r"^rank \d has (\d+) of (\d+) tokens, and keeps ([\d,]+) bytes"
ROW += r"(?:; it computes ([\d,]+) pairs)?$"


def interleaved(tokens, world_size):
    """Return the places of tokens that are dealt out like cards."""
    return [torch.arange(tokens)[rank::world_size] for rank in range(world_size)]


def attend(rank):
    """Compare attention and its gradients with PyTorch's, for several places of the tokens."""
    import context_parallel as lesson

    world_size = dist.get_world_size()
    for order in (lesson.plain, lesson.zigzag, interleaved):
        places = order(13, world_size)
        assert torch.cat(places).sort()[0].tolist() == list(range(13))
        compare_attention(lesson.ATTENTION["ring"], places, 13)
        if world_size == 4:  # as many as heads
            compare_attention(lesson.ATTENTION["ulysses"], places, 13)


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


@pytest.mark.parametrize("world_size", [3, 4])
def test_attention_is_that_of_one_process(world_size):
    """Any number of tokens on a rank, in any places: forward and backward, with large scores."""
    in_group(attend, world_size)


def rows(out):
    """Return what the lesson prints of each rank: its tokens, all tokens, bytes, and pairs."""
    found = []
    for row in re.findall(ROW, out, re.M):
        found.append([int(number.replace(",", "")) for number in row if number])
    return found


@pytest.mark.parametrize(("by", "processes"), [("ring", 4), ("ulysses", 2)])
def test_numbers(by, processes):
    """The losses of single_gpu.py to 1e-10, the tokens of each rank, and nothing on stderr."""
    done = train(LESSON, *STEPS, *SMALL, "--by", by, processes=processes)
    assert not done.stderr
    [right] = single_gpu(*STEPS, *SMALL)
    assert losses(done.stdout) == pytest.approx([right["loss"]], abs=1e-10)
    found = rows(done.stdout)
    assert len(found) == processes
    assert all(row[1] == 14 for row in found)
    assert sum(row[0] for row in found) == 14


def sample(rank):
    """Compare two backward passes of split tokens with those of a whole model, and count."""
    import context_parallel as lesson

    world_size = dist.get_world_size()
    group = dist.group.WORLD
    tokens = 4 * world_size
    places = lesson.zigzag(tokens, world_size)
    torch.manual_seed(0)
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    close = partial(torch.testing.assert_close, atol=1e-12, rtol=1e-10)
    counted = {}
    for by, attention in lesson.ATTENTION.items():
        whole = Transformer(8, layers=1, tokens=tokens).double()
        model = copy.deepcopy(whole)
        lesson.split_tokens(model, attention, places, group)
        lesson.share_logits(model, places, group)
        lesson.add_up_gradients(model, group)
        for _ in range(2):  # gradients accumulate
            whole(images).square().sum().backward()
            with Messages() as messages:
                model(images).square().sum().backward()
        for part, right in zip(model.parameters(), whole.parameters(), strict=True):
            close(part.grad, right.grad)
        counted[by] = messages
    size = 3 * 4 * 8 * 8  # of the tokens of a rank: images, tokens, width, and bytes of a number
    sends = 3 * world_size - 2
    rest = {"all_reduce": len(list(whole.parameters())), "broadcast": 1}
    kinds = {by: Counter(each.kind for each in counted[by].noted) for by in counted}
    assert kinds["ring"] == {"send": sends, "recv": sends} | rest
    assert kinds["ulysses"] == {"all_to_all": 8} | rest
    assert counted["ring"].sent("send") == 2 * sends * size
    assert counted["ulysses"].sent("all_to_all") == 8 * (world_size - 1) * size / world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_and_messages(world_size):
    """Each rank has the gradients of one process. A ring of two sends twice what Ulysses does."""
    in_group(sample, world_size)


PAIRS = 96_040  # 2.5 blocks of 196 x 196


def long_sequence(rank, path):
    """Let the lesson show what each of four ranks keeps of 784 tokens, and count its pairs."""
    import context_parallel as lesson

    scores_of = lesson.scores_of
    pairs = []

    def noted(*arguments):
        """Note how many pairs of tokens are computed."""
        scores = scores_of(*arguments)
        pairs.append(scores[0, 0].numel())
        return scores

    lesson.scores_of = noted
    sizes = {"width": None, "layers": None, "heads": None, "double": False}
    args = argparse.Namespace(model="transformer", tokens=784, by="ring", **sizes)
    model = lesson.make_model(args)
    places = lesson.zigzag(784, 4)
    lesson.split_tokens(model, lesson.RingAttention.apply, places, dist.group.WORLD)
    lesson.share_logits(model, places, dist.group.WORLD)
    batch = torch.randn(12, 1, 28, 28), None
    with open(path / f"rank{rank}", "w") as file, contextlib.redirect_stdout(file):
        lesson.show_tokens(model, places, [batch], torch.device("cpu"), args)
    assert sum(pairs) == 2 * PAIRS  # in each of the two layers


def test_a_long_sequence(tmp_path):
    """With 784 tokens, four ranks keep what sharding.md says: each a fourth of one rank's bytes."""
    page = (ROOT / "playground" / "pages" / "sharding.md").read_text()
    [one, _, four] = re.search(r"^\| 784 \| (.*) \|$", page, re.M)[1].split(" | ")
    in_group(long_sequence, 4, tmp_path)
    found = rows((tmp_path / "rank0").read_text())
    kept = int(four.replace(",", ""))
    assert found == [[196, 784, kept, PAIRS]] * 4
    assert 4 * kept == pytest.approx(int(one.replace(",", "")), rel=1e-3)


def test_the_example_of_the_comment():
    """Its numbers are those of attention, with powers of two."""
    scores = torch.tensor([1.0, 1, 2, 2])
    values = torch.tensor([6.0, 0, 3, 6])
    assert 2**scores @ values / (2**scores).sum() == 4
    sums = []
    for count, m in ((2, 1), (4, 2)):
        weights = 2 ** (scores[:count] - m)
        sums.append([weights.sum().item(), (weights @ values[:count]).item()])
    assert sums == [[2, 6], [3, 12]]
    text = lesson_path(LESSON).read_text()
    assert "s = 1 1 | 2 2 and v = 6 0 | 3 6" in text
    assert "m = 1, total = 1 + 1 = 2, read = 6 + 0 = 6\n" in text
    assert "m = 2, so both are halved: total = 1 + 1 + 1 = 3, read = 3 + 3 + 6 = 12\n" in text
    assert "read / total = 12 / 3 = 4\n" in text


@pytest.mark.parametrize(
    ("processes", "flags", "words"),
    [
        (2, ("--model", "mlp"), ("--model mlp has no tokens", "use --model transformer")),
        (8, ("--tokens", 4), ("8 ranks cannot split --tokens 4", "use more tokens")),
        (3, ("--by", "ulysses"), ("3 ranks cannot split --heads 4", "use --by ring")),
    ],
)
def test_flags_that_cannot_work(processes, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{processes}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, *flags, env=env), *words)


SUM = "        return total\n"
ZEROS = """        if not ctx.is_owner:
            gradient = torch.zeros_like(gradient)
"""
CORRECTED = "                total_of_rows *= correction\n"
ALL = "        return FromOwner.apply(logits, owner, group)"
DETACHED = f"        if dist.get_rank() != owner:\n            logits = logits.detach()\n{ALL}"


@pytest.mark.parametrize(
    ("old", "new", "processes", "least", "most"),
    [
        (SUM, SUM.replace("total", "total / dist.get_world_size()"), 2, 1e-6, 1e-3),  # 1
        (ZEROS, "", 2, 1e-2, 1),  # 2
        (CORRECTED, "", 2, 1e-4, 1),  # 3
        (CORRECTED, "", 1, 0, 1e-10),  # a single rank's ring has one step
    ],
)
def test_wrong_without_an_error(old, new, processes, least, most, change):
    """The first three exercises: the loss differs, and in the first one Adam hides it."""
    flags = (*STEPS, *SMALL, "--width", 32, "--lr", 0.003)
    [found] = losses(train(change(LESSON, (old, new)), *flags, processes=processes).stdout)
    [right] = single_gpu(*flags)
    assert least <= abs(found - right["loss"]) < most


def test_logits_without_a_graph(change):
    """Exercise 4: rank 1 fails, and rank 0 waits for it in the first all_reduce."""
    copied = change(LESSON, (ALL, DETACHED))
    jobs = ranks(copied, *STEPS, *SMALL, "--timeout", 5, processes=2)
    first, second = [job.wait() for job in jobs]
    assert first.returncode == second.returncode == 1
    assert "element 0 of tensors does not require grad" in second.stderr
    assert "in add_up\n" in first.stderr and "in pass_on\n" not in first.stderr
