"""The context parallelism lesson: attention, gradients, messages and bytes.

The functions without "test" in their names run on ranks, or help them.
"""

import argparse
import contextlib
import copy
import io
import re
from collections import Counter
from functools import partial

import context_parallel as lesson
import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from forked import in_group
from torch.nn import functional as F

from common.models import Transformer
from figures.messages import Messages


def interleaved(tokens, world_size):
    """Return the places of tokens that are dealt out like cards."""
    return [torch.arange(tokens)[rank::world_size] for rank in range(world_size)]


def attend(rank):
    """Compare attention and its gradients with PyTorch's, for several places of 13 tokens."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 13, 3, 5, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    inputs[0] *= 2000  # exp() of such scores overflows
    gradient = torch.randn(2, 13, 3, 5, dtype=torch.float64).transpose(1, 2)
    for each in inputs:
        each.requires_grad_()
    read = F.scaled_dot_product_attention(*inputs, is_causal=True)
    read.backward(gradient)
    close = partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)
    for order in (lesson.plain, lesson.zigzag, interleaved):
        places = order(13, 3)
        assert torch.cat(places).sort()[0].tolist() == list(range(13))
        mine = places[rank]
        for attention in lesson.ATTENTION.values():
            own = [each.detach()[:, :, mine].requires_grad_() for each in inputs]
            found = attention(*own, places, None)
            found.backward(gradient[:, :, mine])
            close(found, read[:, :, mine])
            for each, whole in zip(own, inputs, strict=True):
                close(each.grad, whole.grad[:, :, mine])


def test_attention_is_that_of_one_process():
    """Unequal numbers of tokens, in any places: forward and backward, with large scores."""
    in_group(attend, 3)


def sample(rank):
    """Compare two backward passes of split tokens with those of a whole model, and count."""
    orders = {"ring": lesson.zigzag, "ulysses": lesson.plain}  # the last token is on rank 0, or 3
    torch.manual_seed(0)
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    counted = {}
    for by, attention in lesson.ATTENTION.items():
        places = orders[by](16, 4)
        whole = Transformer(8, layers=1, tokens=16).double()
        model = copy.deepcopy(whole)
        lesson.split_tokens(model, attention, places, dist.group.WORLD)
        lesson.share_logits(model, places, dist.group.WORLD)
        lesson.add_up_gradients(model, dist.group.WORLD)
        for _ in range(2):  # gradients accumulate
            whole(images).square().sum().backward()
            with Messages() as messages:
                model(images).square().sum().backward()
        for part, right in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(part.grad, right.grad, atol=1e-12, rtol=1e-10)
        counted[by] = messages
    size = 3 * 4 * 8 * 8  # of the tokens of a rank: images, tokens, width, and bytes of a number
    rest = {"all_reduce": len(list(whole.parameters())), "broadcast": 1}
    kinds = {by: Counter(each.kind for each in counted[by].noted) for by in counted}
    assert kinds["ring"] == {"send": 10, "recv": 10} | rest  # of the four ranks: 3 + 3 + 4
    assert kinds["ulysses"] == {"all_to_all": 8} | rest
    assert counted["ring"].sent("send") == 2 * 10 * size
    assert counted["ulysses"].sent("all_to_all") == 8 * 3 * size / 4


def test_gradients_and_messages():
    """Each rank has the gradients of one process, and sends what the formulas say."""
    in_group(sample, 4)


def long_sequence(rank, kept):
    """Let the lesson show what each of four ranks keeps of 784 tokens."""
    model = Transformer(tokens=784)
    places = lesson.zigzag(784, 4)
    lesson.split_tokens(model, lesson.ATTENTION["ring"], places, None)
    lesson.share_logits(model, places, None)
    batch = torch.randn(12, 1, 28, 28), None
    args = argparse.Namespace(by="ring")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        lesson.show_tokens(model, places, [batch], torch.device("cpu"), args)
    if rank == 0:
        pairs = f"{5 * 196 * 196 // 2:,}"
        rest = f"has 196 of 784 tokens, and keeps {kept} bytes; it computes {pairs} pairs"
        assert out.getvalue().splitlines() == [f"rank {each} {rest}" for each in range(4)]


def test_a_long_sequence():
    """With 784 tokens, four ranks keep what sharding.md says: each a fourth of one rank's bytes."""
    page = (ROOT / "playground" / "pages" / "sharding.md").read_text()
    one, _, four = re.search(r"^\| 784 \| (.*) \|$", page, re.M)[1].split(" | ")
    in_group(long_sequence, 4, four)
    one, four = (int(number.replace(",", "")) for number in (one, four))
    assert 4 * four == pytest.approx(one, rel=1e-3)
