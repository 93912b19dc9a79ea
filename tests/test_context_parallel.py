"""The context parallelism lesson: attention and bytes. test_pictures.py has the messages.

The functions without "test" in their names run on ranks, or help them.
"""

import argparse
import contextlib
import io
import re
from functools import partial

import context_parallel as lesson
import pytest
import torch
from conftest import ROOT
from torch.nn import functional as F

from common.models import Language
from watching.ranks import call


def interleaved(tokens, world_size):
    """Return the positions of tokens that are dealt out like cards."""
    return [torch.arange(tokens)[rank::world_size] for rank in range(world_size)]


def attend(rank):
    """Compare attention and its gradients with PyTorch's, for several positions of 12 tokens."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 12, 3, 5, dtype=torch.float64).transpose(1, 2) for _ in range(3)]
    inputs[0] *= 2000  # exp() of such scores overflows
    gradient = torch.randn(2, 12, 3, 5, dtype=torch.float64).transpose(1, 2)
    for each in inputs:
        each.requires_grad_()
    read = F.scaled_dot_product_attention(*inputs, is_causal=True)
    read.backward(gradient)
    close = partial(torch.testing.assert_close, atol=1e-9, rtol=1e-9)
    for order in (lesson.plain, lesson.zigzag, interleaved):
        positions = order(12, 3)
        assert torch.cat(tuple(positions)).sort()[0].tolist() == list(range(12))
        mine = positions[rank]
        for attention in lesson.ATTENTION.values():
            own = [each.detach()[:, :, mine].requires_grad_() for each in inputs]
            found = attention(*own, positions, None)
            found.backward(gradient[:, :, mine])
            close(found, read[:, :, mine])
            for each, whole in zip(own, inputs, strict=True):
                close(each.grad, whole.grad[:, :, mine])


def test_attention_is_that_of_one_process():
    """Tokens at any positions: forward and backward, with large scores."""
    call(attend, 3)


def long_rows(rank, tokens, order, shown):
    """Let the lesson show what each of four ranks has and keeps of 12 long rows."""
    model = Language()
    positions = lesson.ORDERS[order](tokens, 4)
    lesson.split_tokens(model, lesson.ATTENTION["ring"], positions, None)
    batch = torch.randint(256, (12, tokens // 4)), None
    args = argparse.Namespace(by="ring")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        lesson.show_tokens(model, positions, [batch], torch.device("cpu"), args)
    if rank == 0:
        assert out.getvalue().splitlines() == shown


@pytest.mark.parametrize("tokens", [128, 1024])
def test_long_rows(tokens):
    """Four ranks keep what sharding.md says: each a fourth of one rank's bytes."""
    page = (ROOT / "playground" / "pages" / "sharding.md").read_text()
    one, _, four = re.search(rf"^\| {tokens:,} \| (.*) \|$", page, re.M)[1].split(" | ")
    own = tokens // 4
    rest = f"has {own} of {tokens} tokens, and keeps {four} bytes; it computes"
    shown = [f"rank {rank} {rest} {5 * own * own // 2:,} scores" for rank in range(4)]
    call(long_rows, 4, tokens, "zigzag", shown)
    plain = [f"rank {rank} {rest} {(rank + 1) * own * own:,} scores" for rank in range(4)]
    call(long_rows, 4, tokens, "plain", plain)
    one, four = (int(number.replace(",", "")) for number in (one, four))
    assert 4 * four == pytest.approx(one, rel=1e-3)
