"""trainer_and_generator.py: the same numbers from any number of trainers, and the update's signs.

test_answers.py has what happens if the weights do not arrive.
"""

import re

import pytest
import torch
import trainer_and_generator as lesson
from launch import run
from lessons import lesson_path
from torch.nn import functional as F

LESSON = "trainer_and_generator"


@pytest.mark.parametrize("flags", [(), ("--stale",)])
def test_the_same_twelve_digits(flags):
    """One trainer and two; they learn, and print what the docstring shows of the last step."""
    printed = {}
    for trainers in (1, 2):
        out = run(LESSON, "--double", *flags, processes=trainers + 1).stdout
        printed[trainers] = re.findall(r"^step .*", out, re.M)
    assert printed[1] == printed[2]
    assert len(printed[1]) == 4
    numbers = re.search(r"reward (0\.\d{12})  ratio 1 \+- (0\.\d{12}), ", printed[1][-1]).groups()
    reward, ratio = map(float, numbers)
    assert f"step 40/40  reward {reward:.3f}  ratio 1 +- {ratio:.3f}," in lesson.__doc__


def test_a_rank_without_an_optimizer_is_watched():
    """watch.py shows the trainers, and says that it has no steps of the generator."""
    out = run("watch", lesson_path(LESSON), "--steps", 8, processes=3).stdout
    assert "Nothing is recorded here of rank 2: on another node, without optimizer" in out
    assert re.search(r"^rank +all .*\n0 .*\n1 .*\n\nrank 0  \|.*\nrank 1  \|", out, re.M), out
    assert "No rank waits long" not in out


def test_the_bytes_of_a_step():
    """The state that is sent and the rows that come back have the bytes that the docstring has."""
    found = re.findall(r"(\d+,\d+) bytes", lesson.__doc__)
    sizes = [int(size.replace(",", "")) for size in found]
    state = lesson.Language(width=32).state_dict()
    rows = torch.empty(32, lesson.TOKENS + 1, dtype=torch.int64)
    old = torch.empty(32, lesson.TOKENS)
    assert sizes == [sum(each.nbytes for each in state.values()), rows.nbytes + old.nbytes]


def test_an_update_makes_good_rows_more_likely():
    """Also from old rows, but then only until the ratio is 1.2 (good rows) or 0.8 (bad ones)."""
    torch.manual_seed(0)
    model = lesson.Language(width=8, layers=1, heads=2).double()
    rows = torch.tensor([[10, *b"aeio"], [10, *b"xyzb"]])

    def chances():
        with torch.no_grad():
            return -F.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="none")

    for far in (0, 1, -1):
        before = chances()
        moved = torch.tensor([[far], [-far]])  # the model has gone this far, or the other way
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        apart = lesson.update(model, optimizer, rows, before - moved, slice(None))
        good, bad = (chances() - before).sum(dim=1).tolist()
        assert (good > 0 > bad) if far < 1 else (good == bad == 0)
        e = torch.e
        assert apart[0].item() == pytest.approx(0 if not far else ((e - 1) + (1 - 1 / e)) / 2)
