"""The lessons are one course: the same skeleton, small differences, tidy code."""

import ast
import difflib
import re
import subprocess
import sys

import pytest
from conftest import LESSONS, ROOT

ORDER = [
    "join", "log", "save", "newest_checkpoint", "now", "report", "work", "blocking", "nonblocking",
    "ring_all_reduce", "relay", "exchange", "send_weights", "average_gradients", "pipeline", "forward", "run_epoch",
    "observe", "talk", "train", "plan", "command", "end", "peak_memory", "follow", "execute",
    "weight_differences", "speed_ups", "by_width", "tell", "main",
]  # fmt: skip
LOOPS = ("run_epoch", "train")
BUILDS_ON = {
    "nonblocking_p2p": ["blocking_p2p"],
    "data_parallel": ["single_gpu"],
    "manual_data_parallel": ["single_gpu", "nonblocking_p2p"],
    "distributed_data_parallel": ["manual_data_parallel"],
    "distributed_data_parallel2": ["distributed_data_parallel"],
    "distributed_data_parallel_torchrun": ["distributed_data_parallel"],
    "model_parallel": ["single_gpu"],
    "pipeline_parallel": ["model_parallel", "distributed_data_parallel"],
}


def source(lesson):
    """Return the text of a lesson."""
    return (ROOT / "playground" / f"{lesson}.py").read_text()


def functions(lesson):
    """Return the functions of a lesson by name, in order, each as its lines of code without the docstring."""
    found = {}
    for node in ast.parse(source(lesson)).body:
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), f"{lesson}.{node.name} has no docstring"
            node.body = node.body[1:] or [ast.Pass()]
            found[node.name] = [line.strip() for line in ast.unparse(node).splitlines()]
    return found


def new_lines(lesson):
    """Return the lines after the docstring that none of the lessons has which this one builds on."""

    def code(name):
        text = source(name)
        return [line for line in text[text.index('"""', 3) + 3 :].splitlines() if line.strip()]

    lines = code(lesson)
    for base in BUILDS_ON[lesson]:
        matcher = difflib.SequenceMatcher(None, code(base), lines, autojunk=False)
        known = {index for block in matcher.get_matching_blocks() for index in range(block.b, block.b + block.size)}
        lines = [line for index, line in enumerate(lines) if index not in known]
    return lines


@pytest.mark.parametrize("lesson", LESSONS)
def test_functions_stand_in_the_same_order(lesson):
    """Whoever knows one lesson finds their way in the next."""
    positions = [ORDER.index(name) for name in functions(lesson)]
    assert positions == sorted(positions)
    assert list(functions(lesson))[-1] == "main"


def starts(lesson):
    """Return how a lesson's processes are started."""
    if "torch.distributed" not in source(lesson):
        return "as one process"
    return "by mp.spawn" if "mp.spawn(" in source(lesson) else "by a launcher"


def test_shared_functions_are_alike(record_property):
    """Compare each function that two lessons share: of the loop most lines are the same, of train at least a third."""
    least = {
        "join": 1.0,
        "now": 1.0,
        "report": 1.0,
        "run_epoch": 0.7,
        "train": 0.3,
        "main": 0.55,
        "talk": 0.2,
        "save": 0.2,
    }
    pairs = []
    lessons = [lesson for lesson in LESSONS if lesson != "compare"]  # it has no loop, it runs the others
    for one in lessons:
        for other in lessons[lessons.index(one) + 1 :]:
            shared = (functions(one).keys() & functions(other).keys()) - {"observe"}  # of modules, and of ranks
            if starts(one) != starts(other) or starts(one) == "by a launcher":
                shared -= {"join", "main"}  # these are where lessons differ that start in different ways
            for name in shared:
                ratio = difflib.SequenceMatcher(None, functions(one)[name], functions(other)[name]).ratio()
                others = ("torchrun", "pipeline")
                special = next((f" of {part}" for part in others if part in one + other and name in LOOPS), "")
                pairs.append((ratio, name + special, one, other))
    record_property("compared", f"{len(pairs)} pairs of functions with the same name in {len(lessons)} lessons")
    assert len(pairs) >= 50
    least |= {"run_epoch of torchrun": 0.3, "train of torchrun": 0.2}  # it also accumulates and resumes
    least |= {"run_epoch of pipeline": 0.35, "train of pipeline": 0.3}  # a schedule does forward and backward
    assert not [pair for pair in pairs if pair[0] < least[pair[1]]]


@pytest.mark.parametrize("lesson", BUILDS_ON)
def test_a_lesson_marks_what_is_new_and_adds_little(lesson):
    """At most 90 new lines (110 where torchrun restarts what must resume), and README says how many."""
    added = new_lines(lesson)
    assert 5 <= len(added) <= (110 if lesson.endswith("torchrun") else 90)
    assert source(lesson).count("# NEW") >= 1
    row = re.search(rf"^\| \[`{lesson}.py`\].*\| (\d+) \(([\w, ]+)\) \|$", (ROOT / "README.md").read_text(), re.M)
    assert row, f"no row for {lesson} in README"
    assert (int(row[1]), row[2].split(", ")) == (len(added), BUILDS_ON[lesson])


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_is_short_and_says_how_to_run_it(lesson):
    """Docstring first, with its own command, output and exercises; short enough for one sitting."""
    text = source(lesson)
    doc = ast.get_docstring(ast.parse(text))
    assert f"python playground/{lesson}.py" in doc
    assert "Break it, in a copy" in doc
    most = 300 if lesson == "compare" else 200  # it closes the course: nothing builds on it, it measures all others
    assert len(text.splitlines()) <= most


@pytest.mark.parametrize("lesson", LESSONS)
def test_help_prints_the_docstring(lesson, main):
    """--help has the commands."""
    out = main(lesson, "--help", status=0).stdout
    assert f"python playground/{lesson}.py" in out
    assert "--device" in out


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff(command):
    """Lint and format are clean."""
    ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "tests" / "ruff.toml", ROOT]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
