"""language_model.py: a token's operations, its steps, its optimizer, its text, and resuming."""

import argparse
import re
import shutil

import language_model
import pytest
import torch
from launch import epochs, run
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.data import ROW
from common.models import Language

LESSON = "language_model"
SHORT = ("--double", "--width", 16, "--batch_size", 24, "--epochs", 1, "--sample", 20)
FEW = {"DOCUMENTS": "20"}


@pytest.mark.parametrize("tied", [False, True])
def test_the_operations_of_a_token(tied):
    """PyTorch counts as many, if attention is a chain of plain matrix products."""
    model = Language(width=32, layers=3, tied=tied)
    rows = torch.randint(256, (2, ROW))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.cross_entropy(model(rows), rows).backward()
    counted = counter.get_total_flops() / rows.numel()
    assert language_model.flops_per_token(model) == counted


def test_the_utilization():
    """It is that of one machine's ranks together: --peak is that of one."""
    for count in (1, 2):
        out = run(LESSON, *SHORT, "--peak", 1e6, processes=count, env=FEW).stdout
        speed, mfu = re.search(r"([\d,]+) tokens/s  MFU ([\d.]+)%", out).groups()
        needed = language_model.flops_per_token(Language(width=16)) * int(speed.replace(",", ""))
        assert float(mfu) / 100 == pytest.approx(needed / 1e6 / count, rel=0.01)


def test_the_learning_rate():
    """It rises in a twentieth of the steps, and falls to a tenth."""
    factors = [language_model.warm_up_and_decay(step, 100) for step in range(101)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert all(before > after for before, after in zip(factors[5:], factors[6:], strict=False))
    assert factors[-1] == pytest.approx(0.1)


def test_matrices_decay():
    """With gradients of zeros, a step shrinks them, and only them."""
    model = Language(width=16, layers=1).double()
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    language_model.make_optimizer(model, argparse.Namespace(lr=0.5, weight_decay=0.1)).step()
    factors = {}
    for name, parameter in model.named_parameters():
        factors[name] = 1 if "norm" in name else 0.95
        assert torch.allclose(parameter, before[name] * factors[name], rtol=1e-12), name
    assert set(factors.values()) == {1, 0.95}


def test_two_ranks_write_the_text_of_one():
    """Tied, checkpointed, in micro-batches of different sizes, clipped: the same digits."""
    flags = (*SHORT, "--tied", "--checkpoint", "--clip", 0.5)
    one = run(LESSON, *flags, "--rows", 24, processes=1, env=FEW).stdout
    two = run(LESSON, *flags, "--rows", 5, processes=2, env=FEW).stdout
    expected = epochs(one)[0]
    assert epochs(two) == [expected | {"loss": pytest.approx(expected["loss"], abs=1e-10)}]
    text = re.findall(r"^    \|.*$", one, re.M)
    assert text[0].startswith("    | The ")
    assert re.findall(r"^    \|.*$", two, re.M) == text


def test_a_resumed_run_ends_like_any_other(tmp_path):
    """The same digits and text, by one rank in place of two. Flags that differ are refused."""
    flags = (*SHORT, "--weight_decay", 0.1, "--run_dir", tmp_path, "--epochs")
    whole = run(LESSON, *flags, 2, processes=2, env=FEW).stdout
    shutil.rmtree(tmp_path / "epoch-0002")
    resumed = run(LESSON, *flags, 2, processes=1, env=FEW).stdout
    assert f"{tmp_path}/epoch-0001: 1 of 2 epochs are done" in resumed
    expected = epochs(whole)[1]
    assert epochs(resumed) == [expected | {"loss": pytest.approx(expected["loss"], abs=1e-10)}]
    lines = re.findall(r"^    \|.*$", whole, re.M)
    written = re.findall(r"^    \|.*$", resumed, re.M)
    assert written == lines[-len(written) :]
    refused = run(LESSON, *flags, 3, processes=1, status=1, env=FEW)
    assert "epoch-0002 was written with --epochs 2: use" in refused.stderr
