"""The lesson on the mean over all tokens: numbers that do not depend on how a batch is divided."""

import re

import first_difference
import pytest
import token_mean as lesson
import torch
from launch import epochs, run
from torch.nn import functional as F

from common.models import Language

LESSON = "token_mean"
FLAGS = ("--double", "--width", 16, "--layers", 1, "--batch_size", 12, "--epochs", 1)


def off_by(out):
    """Return by how much a mean of means is off in the batches that the lesson shows, in %."""
    rows = re.findall(r"^ +[\d,]+ \+ [\d,]+ .* ([\d.]+)%$", out, re.M)
    assert len(rows) == 5
    return [float(percent) for percent in rows]


def trained(folder, *flags, processes):
    """Run the lesson in float64. Returns its epochs and what off_by() returns.

    Its ranks note their steps in the folder.
    """
    folder.mkdir()
    env = {"DOCUMENTS": "20", "NOTES": str(folder)}
    out = run(LESSON, *FLAGS, *flags, processes=processes, env=env).stdout
    return epochs(out), off_by(out)


def test_the_numbers(tmp_path):
    """They do not change with ranks, micro-batches, packing or FSDP. With a mean of means they do.

    The losses agree to 1e-10, and parameters and gradients as first_difference.py compares them.
    """
    lines, off = trained(tmp_path / "one", processes=1)
    assert off == [0] * 5  # there is only one mean
    right = [line | {"loss": pytest.approx(line["loss"], abs=1e-10)} for line in lines]
    steps = first_difference.read(tmp_path / "one")
    fsdp = ("--by", "fsdp", "--micro_batches", 2, "--packed")
    for ranks, flags in ((2, ("--micro_batches", 4)), (3, fsdp)):
        folder = tmp_path / str(ranks)
        found, off = trained(folder, *flags, processes=ranks)
        assert found == right and min(off) > 0
        status, words = first_difference.compare(steps, first_difference.read(folder))
        assert status == 0, words
    wrong, _ = trained(tmp_path / "wrong", "--wrong", "--micro_batches", 2, processes=1)
    assert abs(wrong[0]["loss"] - lines[0]["loss"]) > 1e-4


def paragraphs(*lengths):
    """Return paragraphs of random letters, of these lengths, as the lesson makes them."""
    return [F.pad(torch.randint(1, 256, (length,)), (1, 1)) for length in lengths]


def test_packing():
    """Each paragraph of a row has the logits that it has alone, and its own labels."""
    torch.manual_seed(0)
    model = Language(width=16).double()
    texts = paragraphs(120, 40, 30, 250, 5)
    alone = [model(each[None, :-1])[0] for each in texts]
    rows, labels = lesson.make_rows(texts, packed=True)
    assert rows.shape == labels.shape == (3, 251)
    assert (labels == lesson.IGNORED).sum(1).tolist() == [251 - 193, 0, 251 - 6]
    lesson.keep_apart(model)
    logits = model(rows)
    found = logits.transpose(1, 2)[labels != lesson.IGNORED]
    torch.testing.assert_close(found, torch.cat(alone, dim=1).T)
    assert labels[labels != lesson.IGNORED].equal(torch.cat([each[1:] for each in texts]))


def test_paragraphs():
    """They are the documents without their empty lines, at most 255 bytes each."""
    texts = [b"one\n\n\n\ntwo", b"x" * 300]
    found = [bytes(each.tolist()) for each in lesson.paragraphs_of(texts)]
    assert found == [b"\0one\0", b"\0two\0", b"\0" + b"x" * 255 + b"\0", b"\0" + b"x" * 45 + b"\0"]


def test_a_mean_of_means_of_equal_parts():
    """If all micro-batches have equally many tokens, it is the mean over all of them."""
    model = Language(width=8, layers=1).double()
    ends = (1, 1)
    paragraphs = [F.pad(torch.randint(1, 256, (9,)), ends) for _ in range(6)]
    parts = [lesson.make_rows(paragraphs[number::3], packed=False) for number in range(3)]
    lesson.mean_of_means(model, parts, torch.zeros(3))
    found = [each.grad.clone() for each in model.parameters()]
    model.zero_grad()
    rows, labels = map(torch.cat, zip(*parts, strict=True))
    F.cross_entropy(model(rows), labels).backward()
    torch.testing.assert_close(found, [each.grad for each in model.parameters()])
