"""The activation checkpointing lesson: bytes, passes, dropout, and FSDP's messages."""

import argparse

import activation_checkpointing as lesson
import pytest
import torch
from conftest import DIGITS, one_line
from forked import in_group

from figures.messages import Messages

SIZES = {"width": 16, "layers": 2, "tokens": 7, "heads": 4}
OTHERS = {"width": 24, "layers": 3, "tokens": 4, "heads": 2}


def made(which, sizes=SIZES, double=True, dropout=False):
    """Return the lesson's transformer, with the same numbers each time."""
    torch.manual_seed(0)
    args = argparse.Namespace(model="transformer", **sizes, double=double, dropout=dropout)
    return lesson.build(args, which)


def predicted(images, wrapped, width, layers, tokens, heads, size):
    """Return the bytes that a step should keep on a CPU, without dropout.

    Args:
        images: how many there are in the batch.
        wrapped: how many blocks keep only their input.
        size: bytes of a number.
    """
    # Attention keeps the input of LayerNorm, its output, query, key, value, and what was read.
    # The MLP keeps the input of LayerNorm, its output, and four times as much before and after
    # GELU. For each token, LayerNorm keeps two more numbers, and attention one for each head.
    of_block = tokens * (16 * width + 4 + heads)
    numbers = wrapped * tokens * width + (layers - wrapped) * of_block
    # The first layer keeps the image. The last one keeps the output of the last block, the last
    # token after LayerNorm, with two more numbers, and 10 scores.
    numbers += 784 + tokens * width + width + 2 + 10
    labels = 8 * images
    return images * numbers * size + labels + size  # and the sum of the labels' weights


@pytest.mark.parametrize(("sizes", "double"), [(SIZES, True), (OTHERS, False)])
def test_bytes_and_passes(sizes, double):
    """A wrapped block keeps its input only, and computes twice. The gradients are the same."""
    images, labels = torch.randn(5, 1, 28, 28), torch.arange(5)
    if double:
        images = images.double()
    wrapped = {"none": 0, "second": (sizes["layers"] + 1) // 2, "every": sizes["layers"]}
    assert tuple(wrapped) == lesson.WHICH
    gradients = []
    for which, number in wrapped.items():
        model = made(which, sizes, double)
        found = lesson.run_step(model, images, labels)
        size = 8 if double else 4
        expected = predicted(5, number, **sizes, size=size), sizes["layers"] + number
        assert found == expected
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1:], gradients[:1] * 2)


def test_dropout():
    """Wrapped or not, the same neurons are dropped, so the gradients are the same."""
    images, labels = torch.randn(5, 1, 28, 28).double(), torch.arange(5)
    gradients = []
    for which, dropout in (("none", True), ("every", True), ("none", False)):
        model = made(which, dropout=dropout)
        torch.manual_seed(1)
        lesson.run_step(model, images, labels)
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert not torch.allclose(gradients[2][0], gradients[0][0])


def count_gathers(rank):
    """With wrapped blocks, FSDP gathers each layer as often as without."""
    images = torch.randn(3, 1, 28, 28).double()
    counts = []
    for which in lesson.WHICH:
        model = made(which)
        lesson.shard(model, argparse.Namespace(device="cpu", timeout=60))
        with Messages() as messages:
            model(images).sum().backward()
        counts.append(len(messages.of("all_gather")))
    assert counts == [8, 8, 8]  # of the four layers


def test_no_messages_are_added():
    """The second forward pass uses the parameters that FSDP gathers in backward() anyway."""
    in_group(count_gathers, 2)


def test_wrong_flags(main):
    """Status 2, one line."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    flags = (*DIGITS, "--batch_size", 120, "--model", "mlp")
    words = ("--model mlp has no blocks", "use --model transformer")
    one_line(main("activation_checkpointing", *flags, env=env), *words)
