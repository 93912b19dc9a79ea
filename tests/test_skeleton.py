"""The lessons are one course: the same skeleton, PyTorch by its front door, tidy code."""

import ast
import difflib
import re
import subprocess
import sys

import pytest
from conftest import LESSONS, ROOT, by_torchrun, committed

READING_ORDER = [
    "blocking_p2p",
    "nonblocking_p2p",
    "collectives",
    "single_gpu",
    "data_parallel",
    "manual_data_parallel",
    "overlapped_data_parallel",
    "distributed_data_parallel",
    "distributed_data_parallel2",
    "distributed_data_parallel_torchrun",
    "distributed_data_parallel_resumable",
    "distributed_data_parallel_resnet",
    "profile_steps",
    "manual_sharding",
    "fully_sharded_data_parallel",
    "fully_sharded_checkpoints",
    "model_parallel",
    "manual_pipeline",
    "pipeline_parallel",
    "tensor_parallel",
    "hybrid_parallel",
]
ORDER = ["join", "run_epoch", "train", "talk", "main"]  # what lessons share, in the order it stands
BUILDS_ON = {
    "nonblocking_p2p": ["blocking_p2p"],
    "collectives": ["nonblocking_p2p"],
    "data_parallel": ["single_gpu"],
    "manual_data_parallel": ["single_gpu", "nonblocking_p2p"],
    "overlapped_data_parallel": ["manual_data_parallel"],
    "distributed_data_parallel": ["overlapped_data_parallel"],
    "distributed_data_parallel2": ["distributed_data_parallel"],
    "distributed_data_parallel_torchrun": ["distributed_data_parallel"],
    "distributed_data_parallel_resumable": ["distributed_data_parallel_torchrun"],
    "distributed_data_parallel_resnet": ["distributed_data_parallel_torchrun"],
    "model_parallel": ["single_gpu"],
    "manual_pipeline": ["model_parallel", "distributed_data_parallel_torchrun"],
    "pipeline_parallel": ["manual_pipeline"],
    "manual_sharding": [
        "manual_data_parallel",
        "collectives",
        "distributed_data_parallel_torchrun",
    ],
    "fully_sharded_data_parallel": ["distributed_data_parallel_torchrun", "manual_sharding"],
    "fully_sharded_checkpoints": ["fully_sharded_data_parallel"],
    "tensor_parallel": ["distributed_data_parallel_torchrun"],
    "hybrid_parallel": ["fully_sharded_data_parallel", "tensor_parallel"],
    "profile_steps": ["distributed_data_parallel_torchrun", "manual_data_parallel"],
}
NOT_IN_A_LESSON = [
    "TCPStore",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "dist.rendezvous",
    "deadline",
    "signal.",
    "os._exit",
    ".kill(",
    ".terminate(",
    "TORCH_CPP_LOG_LEVEL",
    "1e-8",
]


def source(lesson):
    """Return the text of a lesson."""
    return (ROOT / "playground" / f"{lesson}.py").read_text()


def functions(lesson):
    """Return the functions of a lesson by name, in order: their code without docstrings."""
    found = {}
    for node in ast.parse(source(lesson)).body:
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), f"{lesson}.{node.name} has no docstring"
            node.body = node.body[1:] or [ast.Pass()]
            found[node.name] = [line.strip() for line in ast.unparse(node).splitlines()]
    return found


def new_lines(lesson):
    """Return the lines of code that none of the lessons has on which this one builds."""

    def code(name):
        text = source(name)
        return [line for line in text[text.index('"""', 3) + 3 :].splitlines() if line.strip()]

    lines = code(lesson)
    for base in BUILDS_ON[lesson]:
        matcher = difflib.SequenceMatcher(None, code(base), lines, autojunk=False)
        known = {
            index
            for block in matcher.get_matching_blocks()
            for index in range(block.b, block.b + block.size)
        }
        lines = [line for index, line in enumerate(lines) if index not in known]
    return lines


def test_every_lesson_has_its_place():
    """The reading order has all lessons, and each builds on earlier ones, except the first two."""
    assert sorted(READING_ORDER) == LESSONS
    assert BUILDS_ON.keys() | {"blocking_p2p", "single_gpu"} == set(LESSONS)
    for lesson, bases in BUILDS_ON.items():
        assert {base for base in bases if base in READING_ORDER} == set(bases), lesson


@pytest.mark.parametrize("lesson", LESSONS)
def test_functions_stand_in_the_same_order(lesson):
    """A reader who knows one lesson finds the same functions in the next."""
    positions = [ORDER.index(name) for name in functions(lesson) if name in ORDER]
    assert positions == sorted(positions)
    assert list(functions(lesson))[-1] == "main"


def test_shared_functions_are_alike(record_property):
    """Compare each function that two lessons share; join is the same wherever ranks start alike."""
    least = {"join": 1.0, "now": 1.0, "report": 1.0, "run_epoch": 0.59, "train": 0.15, "main": 0.35}
    pairs = []
    for one in LESSONS:
        for other in LESSONS[LESSONS.index(one) + 1 :]:
            kinds = {by_torchrun(one), by_torchrun(other)}
            talks = {"talk" in functions(one), "talk" in functions(other)}
            helpers = "distributed_data_parallel2" in (one, other)
            for name in functions(one).keys() & functions(other).keys() & least.keys():
                if name in ("join", "main") and (len(kinds) > 1 or len(talks) > 1 or helpers):
                    continue  # started in another way: there they differ, and should
                special = "resnet" in one + other or "pipeline" in one + other
                if special and name in ("run_epoch", "join"):
                    continue  # a loop over micro-batches, a schedule, a GPU by its number
                lines = functions(one)[name], functions(other)[name]
                ratio = difflib.SequenceMatcher(None, *lines).ratio()
                pairs.append((ratio, name, one, other))
    count = f"{len(pairs)} pairs of functions with the same name in {len(LESSONS)} lessons"
    record_property("compared", count)
    assert len(pairs) >= 100
    assert not [pair for pair in pairs if pair[0] < least[pair[1]]]


@pytest.mark.parametrize("lesson", BUILDS_ON)
def test_a_lesson_marks_what_is_new(lesson, record_property):
    """And something is new in it."""
    added = new_lines(lesson)
    record_property(f"new lines of {lesson}.py against {', '.join(BUILDS_ON[lesson])}", len(added))
    assert len(added) >= 5
    assert "# NEW: " in source(lesson)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_docstring_says_how_to_run_and_what_comes_next(lesson):
    """It has commands, output and exercises under headings, and its last line leads on."""
    doc = ast.get_docstring(ast.parse(source(lesson)))
    assert re.search(rf"^    .*playground/{lesson}\.py", doc, re.M)
    for heading in ("Run it", "It (first )?prints", "Try breaking it, in a copy"):
        assert re.search(rf"^{heading}\b.*", doc, re.M), heading
    assert "\n  1. " in doc
    following = READING_ORDER[READING_ORDER.index(lesson) + 1 :][:1]
    last_lines = " ".join(doc.splitlines()[-3:])
    assert all(f"The next lesson, {name}.py, " in last_lines for name in following)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_is_plain_pytorch(lesson):
    """No stores, no signals, no loops that join or kill; the start and the end are in sight."""
    text = source(lesson)
    words = [word for word in NOT_IN_A_LESSON if word in text]
    assert words == (["1e-8"] if lesson == "single_gpu" else [])
    marks = re.findall(r"# guard rail.*", text)
    assert all(re.fullmatch(r"# guard rail: .+", mark) for mark in marks) and 2 <= len(marks) <= 5
    if "torch.distributed" not in text:
        return
    ends = functions(lesson)["talk" if "talk" in functions(lesson) else "train"]
    assert ends[-1] == "dist.destroy_process_group()"
    if lesson == "distributed_data_parallel2":
        assert text.count("    launch(") == 1
        return
    assert text.count("dist.init_process_group(") == 1
    starts = len(re.findall(r"^ +mp\.spawn\((train|talk), \(args,\), args\.gpus\)", text, re.M))
    assert starts == (0 if by_torchrun(lesson) else 1)


def test_common_is_small():
    """Models, data and the two modules of guard rails, and nothing else."""
    names = {path.name for path in (ROOT / "common").glob("*.py")}
    assert names == {"models.py", "data.py", "guard_rails.py", "roll_call.py"}


@pytest.mark.parametrize("lesson", LESSONS)
def test_help_prints_the_docstring(lesson, main):
    """--help has the commands."""
    out = main(lesson, "--help", status=0).stdout
    assert f" playground/{lesson}.py" in out
    assert "--device" in out


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff(command):
    """Lint and format are clean. What a learner has changed in an exercise does not count."""
    ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "tests" / "ruff.toml", ROOT]
    for path in (ROOT / "playground" / "exercises").glob("*.py"):
        if path.read_text() != committed(path.relative_to(ROOT)):
            ruff += ["--exclude", path]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
