"""The lessons are one course: the same skeleton, small differences, PyTorch by its front door, tidy code."""

import ast
import difflib
import re
import subprocess
import sys

import pytest
from conftest import LESSONS, ROOT, by_torchrun

ORDER = [
    "join", "report", "now", "relay", "exchange", "work", "blocking", "nonblocking", "ring_all_reduce", "broadcast",
    "scatter", "gather", "all_gather", "reduce", "reduce_scatter", "all_to_all", "all_reduce", "send_weights",
    "average_gradients", "log", "newest_checkpoint", "download", "load", "cut", "cut_by_hand", "shard", "whole",
    "pipeline", "forward", "run_epoch", "save", "show_steps", "observe", "talk", "train", "main",
]  # fmt: skip
BUILDS_ON = {
    "nonblocking_p2p": ["blocking_p2p"],
    "collectives": ["nonblocking_p2p"],
    "data_parallel": ["single_gpu"],
    "manual_data_parallel": ["single_gpu", "nonblocking_p2p"],
    "distributed_data_parallel": ["manual_data_parallel"],
    "distributed_data_parallel2": ["distributed_data_parallel"],
    "distributed_data_parallel_torchrun": ["distributed_data_parallel"],
    "distributed_data_parallel_resumable": ["distributed_data_parallel_torchrun"],
    "distributed_data_parallel_resnet": ["distributed_data_parallel_torchrun"],
    "model_parallel": ["single_gpu"],
    "pipeline_parallel": ["model_parallel", "distributed_data_parallel_torchrun"],
    "manual_sharding": ["manual_data_parallel", "collectives", "distributed_data_parallel_torchrun"],
    "fully_sharded_data_parallel": ["distributed_data_parallel_torchrun", "manual_sharding"],
    "tensor_parallel": ["distributed_data_parallel_torchrun"],
    "hybrid_parallel": ["fully_sharded_data_parallel", "tensor_parallel"],
    "profile_steps": ["distributed_data_parallel_torchrun", "manual_data_parallel"],
}
MOST_LINES = {
    "blocking_p2p": 170, "nonblocking_p2p": 170, "single_gpu": 120, "data_parallel": 120, "manual_data_parallel": 195,
    "distributed_data_parallel": 170, "distributed_data_parallel_torchrun": 145, "model_parallel": 160, "compare": 300,
    "collectives": 170,
}  # fmt: skip
NOT_IN_A_LESSON = [
    "TCPStore", "FileStore", "HashStore", "PrefixStore", "dist.rendezvous", "deadline", "sign_in", "meeting", "signal.",
    "os._exit", ".kill(", ".terminate(", "TORCH_CPP_LOG_LEVEL", "profiled(", "1e-8",
]  # fmt: skip
COURSE = [lesson for lesson in LESSONS if lesson != "compare"]  # a tool that runs the others


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


def test_every_lesson_has_its_place():
    """Each lesson builds on others that are there, but for the two that begin."""
    assert BUILDS_ON.keys() | {"blocking_p2p", "single_gpu"} == set(COURSE)
    assert {base for bases in BUILDS_ON.values() for base in bases} <= set(COURSE)


@pytest.mark.parametrize("lesson", COURSE)
def test_functions_stand_in_the_same_order(lesson):
    """Whoever knows one lesson finds their way in the next."""
    positions = [ORDER.index(name) for name in functions(lesson)]
    assert positions == sorted(positions)
    assert list(functions(lesson))[-1] == "main"


def test_shared_functions_are_alike(record_property):
    """Compare each function that two lessons share: those that join, and report, are the same; of the loop most is."""
    least = {"join": 1.0, "now": 1.0, "report": 1.0, "run_epoch": 0.59, "train": 0.2, "talk": 0.15, "main": 0.4}
    pairs = []
    for one in COURSE:
        for other in COURSE[COURSE.index(one) + 1 :]:
            kinds = {by_torchrun(one), by_torchrun(other)}
            talks = {"talk" in functions(one), "talk" in functions(other)}
            helpers = "distributed_data_parallel2" in (one, other)
            for name in functions(one).keys() & functions(other).keys() & least.keys():
                if name in ("join", "main") and (len(kinds) > 1 or len(talks) > 1 or helpers):
                    continue  # started in another way: there they differ, and should
                special = "resnet" in one + other or "pipeline" in one + other
                if special and name in ("run_epoch", "join"):
                    continue  # a loop over pieces, a schedule in place of the loop; a GPU by its number
                ratio = difflib.SequenceMatcher(None, functions(one)[name], functions(other)[name]).ratio()
                pairs.append((ratio, name, one, other))
    record_property("compared", f"{len(pairs)} pairs of functions with the same name in {len(COURSE)} lessons")
    assert len(pairs) >= 100
    assert not [pair for pair in pairs if pair[0] < least[pair[1]]]


@pytest.mark.parametrize("lesson", BUILDS_ON)
def test_a_lesson_marks_what_is_new_and_adds_little(lesson, record_property):
    """At most 90 new lines, and marks where the idea is."""
    added = new_lines(lesson)
    record_property(f"new lines of {lesson}.py against {', '.join(BUILDS_ON[lesson])}", len(added))
    assert 5 <= len(added) <= 90
    assert source(lesson).count("# NEW") >= 1


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_is_short_and_says_how_to_run_it(lesson):
    """Docstring first, with its own command, output and exercises; short enough for one sitting."""
    text = source(lesson)
    doc = ast.get_docstring(ast.parse(text))
    assert f" playground/{lesson}.py" in doc
    assert "Break it, in a copy" in doc
    assert len(text.splitlines()) <= MOST_LINES.get(lesson, 200)


@pytest.mark.parametrize("lesson", COURSE)
def test_a_lesson_is_plain_pytorch(lesson):
    """No stores, no signals, no loops that join or kill, no way round Python's end; the start and the end in sight."""
    text = source(lesson)
    words = [word for word in NOT_IN_A_LESSON if word in text and (word, lesson) != ("1e-8", "single_gpu")]
    assert not words
    assert text.count("# guard rail") <= 3
    if "torch.distributed" not in text:
        return
    ends = functions(lesson)["talk" if "talk" in functions(lesson) else "train"]
    assert ends[-1] == "dist.destroy_process_group()"
    if lesson == "distributed_data_parallel2":
        assert text.count("    launch(train, ") == 1
        return
    assert text.count("dist.init_process_group(") == 1
    starts = len(re.findall(r"^    +mp\.spawn\((train|talk), \(args,\), args\.gpus\)", text, re.M))
    assert starts == (0 if by_torchrun(lesson) else 1)


def test_common_is_small():
    """Models, data and guard rails, and nothing else."""
    lines = {path.name: len(path.read_text().splitlines()) for path in (ROOT / "common").glob("*.py")}
    assert lines.keys() == {"models.py", "data.py", "guard_rails.py"}
    assert sum(lines.values()) <= 540


@pytest.mark.parametrize("lesson", LESSONS)
def test_help_prints_the_docstring(lesson, main):
    """--help has the commands."""
    out = main(lesson, "--help", status=0).stdout
    assert f" playground/{lesson}.py" in out
    assert "--device" in out


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_ruff(command):
    """Lint and format are clean."""
    ruff = [sys.executable, "-m", "ruff", *command, "--config", ROOT / "tests" / "ruff.toml", ROOT]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
