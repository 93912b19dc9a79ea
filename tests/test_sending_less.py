"""sending_less.py: when its ways agree to the last digit, and what local SGD sends.

test_answers.py has DiLoCo's steps.
"""

import json
import re
from itertools import pairwise
from statistics import median

import pytest
import sending_less
from conftest import DIGITS, ROOT, losses, run
from nodes import need
from torch.utils.data import DataLoader

from common.models import MLP
from figures import sending_less as picture

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
    flags = ("--by", "local", *DIGITS, "--width", "256", "--epochs", "1")
    found = picture.run(1, flags)
    size = sum(parameter.nbytes for parameter in MLP(width=256).parameters()) / 1e6
    assert len(found["test"]) == 1
    assert size < found["megabytes"] < 1.05 * size


def test_the_tables_have_the_counts_of_the_picture():
    """Those of measured.md, and that of the docstring, which has two ranks."""
    counts = json.loads((ROOT / "playground/pages/figures/pictures.json").read_text())[
        "sending_less"
    ]
    page = (ROOT / "playground/pages/measured.md").read_text()
    for ranks, runs in counts.items():
        assert runs.keys() == picture.WAYS.keys()
        for way, found in runs.items():
            seconds = median(end - start for start, end in pairwise([0, *found["seconds"]]))
            first = f"{found['test'][0]:.2f}%"
            cells = [f"{seconds:.1f}", f"{found['megabytes']:.1f}", first]
            ended = [epoch for epoch, end in enumerate(found["seconds"]) if end <= 20]
            last = f"{found['test'][ended[-1]]:.2f}% |" if ended else "|"
            assert f" | {' | '.join(cells)} | {last}\n" in page
            if ranks == "2 ranks" and way != "batch of 5120":
                assert re.search(rf" {' +'.join(cells)}\n", sending_less.__doc__), way
