"""The museum: what the exhibits print, their cures, and what first_difference.py says of them.

The digits stand in the docstring of each exhibit, and the lines that repair it in answers.md.
"""

import contextlib
import io
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import first_difference
import pytest
from launch import Job
from lessons import LESSONS, ROOT, docstring

from watch_ranks.ranks import call, free_port
from watch_ranks.steps import Notes

MUSEUM = ROOT / "playground" / "museum"
ANSWERS = (MUSEUM / "answers.md").read_text()
AGREE = "the ranks agree: 12 steps"
# What the tool says: by `ranks` of the bug, and its status; by `compare` with one process; and the
# status of `ranks` when it is repaired (3: ranks that have parts of a model may be right or wrong).
EXHIBITS = {
    "head_and_backbone": (1, "goes past DDP: model.module(x)", "a message is missing", 0),
    "accumulated": (1, "no_sync()", "a message is missing", 0),
    "shuffled": (3, "(53 by several ranks), 53 not once", "See the sampler (seed", 0),
    "own_sampler": (3, "61 once at most", "16 are on no rank", 0),
    "tested": (0, AGREE, "equal up to rounding: 12 steps", 0),  # the tool sees no test
    "resumed": (3, "by step 12, 49 of 192 examples", "step 10, gradient of 0.weight", 0),
    "moving_average": (1, "step 4 leaves", "step 5, value of 0.weight and 3 more, on rank 1", 0),
    "standardized": (3, "buffers: 0.mean and 1 more", "Buffers differ, too", 0),
    "dropout": (3, "all ranks draw equal random numbers", "have drawn equal random numbers", 3),
    "padded_texts": (0, AGREE, "See the loss (a sum, unequal parts", 0),
    "halves_of_texts": (1, "#4 of ranks [0] all_reduce", "a message is missing", 0),
    "masked_tokens": (0, AGREE, "It is about 2 times", 0),
    "split_matrices": (3, "Right for shards", "See biases: one that is added on each rank", 3),
    "twins": (0, AGREE, "divided by 2, with 2 ranks", 0),
    "balanced_experts": (0, AGREE, "router.weight and 1 more, on all 2 ranks, alike", 0),
    "two_experts": (3, "clipping by a norm that has only", "a factor of its own: 1.21098", 3),
    "clipped_matrices": (3, "Right for shards", "clipping (which gradients its norm counts", 3),
}


def visit(rank, size, path, folder, port):
    """Run an exhibit as a rank, and note its steps. Returns what it prints."""
    Notes(folder, 100)
    if size > 1:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        os.environ |= zip(names, map(str, (rank, size, "localhost", port)), strict=True)
    sys.path.insert(0, str(path.parent))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def run(path, size, folder):
    """Run an exhibit on several ranks. Returns what rank 0 prints."""
    folder.mkdir()
    return call(visit, size, size, path, folder, free_port(), group=False)[0]


def repaired(name):
    """Return the text of an exhibit after the edits that its answer shows."""
    text = (MUSEUM / f"{name}.py").read_text()
    [answer] = re.findall(rf"^## {name}\n(.*?)(?=^## |\Z)", ANSWERS, re.M | re.S)
    for edit in re.findall(r"^```diff\n(.*?)^```", answer, re.M | re.S):
        lines = edit.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] in (" ", sign)) for sign in "-+")
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("name", EXHIBITS)
def test_exhibit(name, tmp_path):
    """Two processes print other digits than one, until it is repaired; and the tool says why."""
    path = MUSEUM / f"{name}.py"
    status, among_ranks, compared, status_of_cure = EXHIBITS[name]
    right = run(path, 1, tmp_path / "one")
    wrong = run(path, 2, tmp_path / "two")
    digits = re.findall(r"^    (step 12  loss \d\.\d{12})$", path.read_text(), re.M)
    assert [right.splitlines()[-1], wrong.splitlines()[-1]] == digits
    found, words = first_difference.compare_ranks(tmp_path / "two")
    assert found == status and among_ranks in words, words
    one, two = (first_difference.read(tmp_path / folder) for folder in ("one", "two"))
    found, words = first_difference.compare(one, two)
    assert found == (name != "tested") and compared in words, words
    copy = tmp_path / path.name
    copy.write_text(repaired(name))
    shutil.copy(MUSEUM / "hall.py", tmp_path)
    assert run(copy, 2, tmp_path / "cured") == right
    found, words = first_difference.compare(one, first_difference.read(tmp_path / "cured"))
    assert found == 0 and words.startswith("equal up to rounding: 12 steps"), words
    found, words = first_difference.compare_ranks(tmp_path / "cured")
    assert found == status_of_cure, words


def test_the_commands_of_readme(tmp_path):
    """As they are typed, the commands find the first exhibit."""
    readme = (MUSEUM / "README.md").read_text()
    block = re.search(r"^        NAME=.*?(?=^$)", readme, re.M | re.S)[0]
    for name in ("museum", "tools"):
        shutil.copytree(ROOT / "playground" / name, tmp_path / "playground" / name)
    bin_first = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = Job("bash", "-c", block, cwd=tmp_path, env={"PATH": bin_first}).wait()
    _, among_ranks, compared, _ = EXHIBITS["head_and_backbone"]
    assert among_ranks in done.stdout and compared in done.stdout, done.stderr


def test_all_are_listed():
    """Each exhibit has a row in README.md and an answer, in one order, and a lesson names it."""
    readme = (MUSEUM / "README.md").read_text()
    rows = re.findall(r"^\| \[`(\w+)`\]\(\1\.py\)", readme, re.M)
    assert rows == [*EXHIBITS] == re.findall(r"^## (\w+)", ANSWERS, re.M)
    assert {*EXHIBITS, "hall"} == {path.stem for path in MUSEUM.glob("*.py")}
    named = [
        name
        for lesson in LESSONS
        if "`playground/museum/`" in docstring(lesson)
        for name in re.findall(r"`(\w+)\.py`", docstring(lesson))
    ]
    assert {*EXHIBITS} <= {*named}
