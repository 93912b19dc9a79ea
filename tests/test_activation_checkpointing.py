"""The activation checkpointing lesson: dropout, and FSDP's messages."""

import argparse

import activation_checkpointing as lesson
import torch

from watch_ranks.messages import Messages
from watch_ranks.ranks import call

SIZES = {"width": 16, "layers": 2, "tokens": 7, "heads": 4}


def made(which, dropout=False):
    """Return the lesson's transformer, with the same numbers each time."""
    torch.manual_seed(0)
    args = argparse.Namespace(model="transformer", **SIZES, double=True, dropout=dropout)
    return lesson.build(args, which)


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
    call(count_gathers, 2)
