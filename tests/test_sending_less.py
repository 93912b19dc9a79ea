"""sending_less.py: when its ways agree to the last digit, and what local SGD sends.

test_answers.py has DiLoCo's steps.
"""

import re
import sys

import pytest
import sending_less
from launch import DIGITS, Job, losses, run
from lessons import ROOT
from nodes import need
from torch.utils.data import DataLoader

from common.models import MLP

SGD = (*DIGITS, "--batch_size", 120, "--epochs", 2, "--double", "--sgd", "--lr", 0.1)
SAME = [
    ("--by", "local", "--every", 1),
    ("--by", "diloco", "--every", 1, "--outer_lr", 1, "--outer_momentum", 0),
]


def test_the_same_twelve_digits():
    """With plain SGD, it makes no difference whether gradients or parameters are averaged."""
    expected = losses(run("sending_less", *SGD, processes=3).stdout)
    for flags in SAME:
        found = losses(run("sending_less", *SGD, *flags, processes=3).stdout)
        assert found == pytest.approx(expected, abs=2e-12)
    seldom = losses(run("sending_less", *SGD, *SAME[0][:2], processes=3).stdout)
    assert abs(seldom[1] - expected[1]) > 1e-3


def test_batches_are_counted_and_not_steps():
    """A rank that skips a step of the optimizer agrees when the others do: after 3, 6 and 7."""
    agreed, seen = [], []
    loader = sending_less.LocalSteps(DataLoader(range(7)), lambda: agreed.append(len(seen)), 3)
    for batch in loader:
        seen.append(batch)  # no step at all
    assert agreed == [3, 6, 7]


def test_bytes_on_the_wire():
    """On simulated nodes: an epoch of local SGD sends the parameters once, and nothing else."""
    need("ip", "tc")
    flags = ["--by", "local", *DIGITS, "--width", "256", "--epochs", "1"]
    lesson = "playground/replicated/sending_less.py"
    settings = {"GPUS": "1", "BANDWIDTH": "10mbit", "PYTHON": sys.executable}
    done = Job(ROOT / "run" / "rehearse_two_nodes.sh", lesson, *flags, env=settings).wait()
    assert done.returncode == 0, done.stderr
    sent = float(re.search(r"sent by this node: (\S+) MB", done.stdout)[1])
    size = sum(parameter.nbytes for parameter in MLP(width=256).parameters()) / 1e6
    assert size < sent < 1.05 * size
