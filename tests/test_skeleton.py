"""What stands below a fold, what differs a little above it, and what imports what."""

import ast
import difflib
import re
import subprocess

import pytest
from fold import FOLD, folded
from lessons import LESSONS, READING_ORDER, ROOT, docstring, lesson_path

IN_FULL = {  # these show the frames, which the others have below a fold; or have one of their own
    "blocking_p2p",
    "single_gpu",
    "manual_data_parallel",
    "distributed_data_parallel",
    "distributed_data_parallel_torchrun",
    "finding_hangs",
}


@pytest.mark.parametrize("lesson", LESSONS)
def test_what_stands_below_the_fold(lesson):
    """It is what the named lesson has, line by line. That lesson comes earlier."""
    text = lesson_path(lesson).read_text()
    fold = FOLD.search(text)
    assert (fold is None) == (lesson in IN_FULL)
    if fold is None:
        return
    assert folded(text) == text, f"run: python tests/develop/fold.py {lesson_path(lesson)}"
    assert READING_ORDER.index(fold[1].removesuffix(".py")) < READING_ORDER.index(lesson)
    assert "# NEW: " in text[: fold.start()] and "# NEW: " not in text[fold.end() :]


# The six lessons that train the plain model, whose diff is what is new.
IN_ONE_ORDER = ["single_gpu", "data_parallel", "manual_data_parallel", "model_parallel"]
IN_ONE_ORDER += ["distributed_data_parallel", "distributed_data_parallel_torchrun"]
ORDER = ["main", "train", "join", "loaders", "fit_epoch", "run_epoch", "save"]


@pytest.mark.parametrize("lesson", IN_ONE_ORDER)
def test_the_order_of_calls(lesson):
    """Functions stand in the order in which they are called, so no diff shows one that moved."""
    tree = ast.parse(lesson_path(lesson).read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [name for name in names if name in ORDER] == [name for name in ORDER if name in names]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_docstring_compares_two_lessons(lesson):
    """Its commands show what has changed in it (in single_gpu.py: since it)."""
    commands = re.findall(r"^ +(git diff .*)$", docstring(lesson), re.M)
    assert commands or lesson not in IN_ONE_ORDER
    for command in commands:
        shown = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
        assert (shown.returncode, shown.stderr) == (1, "")  # 1: the files are there, and differ
        own = "distributed_data_parallel" if lesson == "single_gpu" else lesson
        assert f"+++ b/playground/{own}.py\n" in shown.stdout


MAY_IMPORT = {  # the parts of the course that stand below each folder
    "common": {"common"},
    "playground": {"common"},
    "playground/replicated": {"common"},
    "playground/sharded": {"common"},
    "playground/split": {"common"},
    "playground/transformer": {"common"},
    "playground/language": {"common"},
    "playground/tools": set(),
    "playground/tools/watch_ranks": set(),
    "playground/museum": set(),
    "playground/exercises": {"check", "judging"},
    "playground/exercises/judging": {"common", "check", "judging"},
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
        above = {"common", "check", "judging", *LESSONS} - MAY_IMPORT[folder]
        if path.stem != "four_axes":  # it is the sum of several lessons
            assert not modules & above, path


OF_EACH = ("train", "main", "add_flags", "check_flags")  # each lesson has its own
# Functions above the fold whose code nearly is that of an earlier lesson, and why it differs.
NEARLY = {}


def code_of(node):
    """Return the lines of a function or class, without comments and its own docstring."""
    if ast.get_docstring(node):
        node.body = node.body[1:]
    return ast.unparse(node).splitlines()


def test_what_differs_a_little_is_marked():
    """A reader who knows a function sees what has changed in it: by a NEW mark, or as listed."""
    above = {}
    found = set()
    for lesson in READING_ORDER:
        text = lesson_path(lesson).read_text()
        text = re.split(r"^# -{10} ", text, maxsplit=1, flags=re.M)[0]
        for node in ast.parse(text).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name in OF_EACH:
                continue
            is_marked = "# NEW: " in ast.get_source_segment(text, node)
            code = code_of(node)
            for earlier, before in above.setdefault(node.name, {}).items():
                changed = [line for line in difflib.ndiff(before, code) if line[0] in "+-"]
                is_near = 0 < len(changed) <= min(4, len(code) // 2)
                if is_near and not is_marked and code not in above[node.name].values():
                    found.add((earlier, lesson, node.name))
            above[node.name][lesson] = code
    assert found == NEARLY.keys(), sorted(found)
