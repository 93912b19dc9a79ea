"""The lessons are one course: the same skeleton, PyTorch by its front door, tidy code.

.ruff.toml forbids some names, such as those of stores and signals, and functions without docstring.
"""

import ast
import contextlib
import importlib
import re

import pytest
from conftest import ROOT, STANDIN, by_torchrun, lesson_path
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


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_is_plain_pytorch(lesson):
    """Nothing joins or kills but the starter of the ranks; their start and end are in sight."""
    text = source(lesson)
    words = [".kill(", ".terminate(", "TORCH_CPP_LOG_LEVEL"]
    alone = 'init_process_group("fake"' in text  # there are no other ranks to start
    starter = "torch.distributed" in text and not by_torchrun(lesson) and not alone
    expected = [".kill(", "TORCH_CPP_LOG_LEVEL"] if starter else []  # it hides back traces
    assert [word for word in words if word in text] == expected
    if "torch.distributed" not in text:
        return
    function = r"^def (?:talk|train)\((?:.*\n)(?:(?: .*)?\n)+"
    assert re.search(function, text, re.M)[0].rstrip().endswith("dist.destroy_process_group()")
    if lesson == "distributed_data_parallel2":
        assert text.count("    launch(") == 1
        return
    assert text.count("dist.init_process_group(") == 1
    start = r"mp\.spawn\((train|talk), \(args,\), (args\.gpus|RANKS, join=False)\)"
    starts = len(re.findall(start, text))
    assert starts == (1 if starter else 0)


def test_help_is_short(capsys, monkeypatch):
    """--help prints what the lesson is about and its flags. The commands are in the file."""
    monkeypatch.syspath_prepend(STANDIN)  # for the lesson that needs detectron2
    for lesson in LESSONS:
        monkeypatch.setattr("sys.argv", [f"{lesson}.py", "--help"])
        with contextlib.suppress(SystemExit):  # torchrun's @record turns it into a return
            importlib.import_module(lesson).main()
        out = capsys.readouterr().out
        first = ast.get_docstring(ast.parse(source(lesson))).partition("\n\n")[0]
        usage, about, rest = out.split("\n\n", 2)
        assert usage == f"usage: {lesson}.py [flags]"
        assert about.split() == first.split()
        assert "\n  --device " in rest
        assert "playground/" not in rest.replace("beside playground/", "")


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
