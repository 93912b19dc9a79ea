"""language_model.py: what it counts as a token's operations, its steps, its text, and its traps."""

import argparse
import re

import language_model
import pytest
import torch
from conftest import epochs, run
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from common.data import ROW
from common.models import make_model

LESSON = "language_model"
SHORT = ("--double", "--width", 16, "--batch_size", 24, "--epochs", 1, "--sample", 20)
FEW = {"DOCUMENTS": "20"}


@pytest.mark.parametrize("tied", [False, True])
def test_the_operations_of_a_token(tied):
    """PyTorch counts as many, if attention is a chain of plain matrix products."""
    flags = {"model": "language", "width": 32, "layers": 3, "heads": None, "double": False}
    model = make_model(argparse.Namespace(**flags, tied=tied))
    rows = torch.randint(256, (2, ROW))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        F.cross_entropy(model(rows), rows).backward()
    counted = counter.get_total_flops() / rows.numel()
    assert language_model.flops_per_token(model) == counted


def test_the_learning_rate():
    """It rises in a twentieth of the steps, and falls to a tenth."""
    factors = [language_model.warm_up_and_decay(step, 100) for step in range(101)]
    assert factors[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert all(before > after for before, after in zip(factors[5:], factors[6:], strict=False))
    assert factors[-1] == pytest.approx(0.1)


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
