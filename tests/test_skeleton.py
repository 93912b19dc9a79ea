"""What stands below a fold, and what imports what."""

import ast
import re

import pytest
from conftest import ROOT, lesson_path
from fold import FOLD, folded
from lessons import LESSONS

LIST = (ROOT / "playground" / "README.md").read_text()
READING_ORDER = re.findall(r"^\| \d+\. \[`(\w+)\.py`\]\(", LIST, re.M)
IN_FULL = {  # these show the frames, which the others have below a fold; or have one of their own
    "blocking_p2p",
    "single_gpu",
    "manual_data_parallel",
    "distributed_data_parallel",
    "distributed_data_parallel_torchrun",
    "finding_hangs",
}


def source(lesson):
    """Return the text of a lesson."""
    return lesson_path(lesson).read_text()


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_stands_below_the_fold(lesson):
    """It is what the named lesson has, line by line. That lesson comes earlier."""
    text = source(lesson)
    fold = FOLD.search(text)
    assert (fold is None) == (lesson in IN_FULL)
    if fold is None:
        return
    assert folded(text) == text, f"run: python tests/fold.py {lesson_path(lesson)}"
    assert READING_ORDER.index(fold[1].removesuffix(".py")) < READING_ORDER.index(lesson)
    assert "# NEW: " in text[: fold.start()] and "# NEW: " not in text[fold.end() :]


MAY_IMPORT = {  # the parts of the course that stand below each folder
    "common": {"common"},
    "playground": {"common"},
    "playground/replicated": {"common"},
    "playground/sharded": {"common"},
    "playground/split": {"common"},
    "playground/transformer": {"common"},
    "playground/language": {"common"},
    "playground/tools": {"figures"},  # plan.py draws
    "playground/pages/figures": {"common", "figures", *LESSONS},
    "playground/exercises": {"check", "judging"},
    "playground/exercises/judging": {"common", "figures", "check", "judging"},
    "playground/exercises/judging/checks": {"common", "check", "judging"},
}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_no_import_runs_back_up(folder):
    """Instruments know no lessons, lessons know no tools, and common/ knows nothing else."""
    for path in (ROOT / folder).glob("*.py"):
        modules = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules |= {each.name.split(".")[0] for each in node.names}
            if isinstance(node, ast.ImportFrom):
                modules.add(node.module.split(".")[0])
        above = {"common", "figures", "check", "judging", *LESSONS} - MAY_IMPORT[folder]
        if path.stem != "four_axes":  # it is the sum of several lessons
            assert not modules & above, path
