"""The lessons are one course: the same skeleton, PyTorch by its front door, tidy code."""

import ast
import re

import pytest
from conftest import ROOT, by_torchrun, lesson_path, run
from fold import FOLD, folded
from lessons import LESSONS, PATHS

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
    "sharded_optimizer",
    "manual_fully_sharded",
    "fully_sharded_data_parallel",
    "fully_sharded_checkpoints",
    "model_parallel",
    "manual_pipeline",
    "pipeline_parallel",
    "tensor_parallel",
    "hybrid_parallel",
    "mixed_precision",
    "activation_checkpointing",
    "sequence_parallel",
    "context_parallel",
    "expert_parallel",
    "three_axes",
]
IN_FULL = {  # these show the frames, which the others have below a fold
    "blocking_p2p",
    "single_gpu",
    "manual_data_parallel",
    "distributed_data_parallel",
    "distributed_data_parallel_torchrun",
}
NOT_IN_A_LESSON = ["TCPStore", "FileStore", "HashStore", "PrefixStore", "dist.rendezvous"]
NOT_IN_A_LESSON += ["deadline", "signal.", "os._exit", ".kill(", ".terminate("]
NOT_IN_A_LESSON += ["TORCH_CPP_LOG_LEVEL", "1e-8"]


def source(lesson):
    """Return the text of a lesson."""
    return lesson_path(lesson).read_text()


def functions(lesson):
    """Return the functions of a lesson by name, in order: their code without docstrings."""
    found = {}
    for node in ast.parse(source(lesson)).body:
        if isinstance(node, ast.FunctionDef):
            assert ast.get_docstring(node), f"{lesson}.{node.name} has no docstring"
            node.body = node.body[1:] or [ast.Pass()]
            found[node.name] = [line.strip() for line in ast.unparse(node).splitlines()]
    return found


def test_every_lesson_has_its_place():
    """The reading order has all lessons."""
    assert sorted(READING_ORDER) == LESSONS


@pytest.mark.parametrize("lesson", READING_ORDER)
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
    """No stores, no signals, no loops that join or kill; the start and the end are in sight."""
    text = source(lesson)
    words = [word for word in NOT_IN_A_LESSON if word in text]
    expected = ["1e-8"] if lesson == "single_gpu" else []
    if "torch.distributed" in text and not by_torchrun(lesson):
        expected = [".kill(", "TORCH_CPP_LOG_LEVEL"]  # it ends its ranks, and hides back traces
    assert words == expected
    if "torch.distributed" not in text:
        return
    ends = functions(lesson)["talk" if "talk" in functions(lesson) else "train"]
    assert ends[-1].strip() == "dist.destroy_process_group()"
    if lesson == "distributed_data_parallel2":
        assert text.count("    launch(") == 1
        return
    assert text.count("dist.init_process_group(") == 1
    starts = len(re.findall(r"^ +mp\.spawn\((train|talk), \(args,\), args\.gpus\)", text, re.M))
    assert starts == (0 if by_torchrun(lesson) else 1)


@pytest.mark.parametrize("lesson", LESSONS)
def test_help_is_short(lesson):
    """--help prints what the lesson is about and its flags. The commands are in the file."""
    out = run(lesson, "--help").stdout
    first = ast.get_docstring(ast.parse(source(lesson))).partition("\n\n")[0]
    usage, about, rest = out.split("\n\n", 2)
    assert usage == f"usage: {lesson}.py [flags]"
    assert about.split() == first.split()
    assert "\n  --device " in rest
    assert "playground/" not in rest.replace("beside playground/", "")
    assert " ".join(rest.split()).endswith("has commands to run, and what they print.")


MAY_IMPORT = {  # what stands below each folder
    "common": {"common"},
    "playground": {"common", "lessons"},
    "playground/sharded": {"common", "lessons"},
    "playground/split": {"common", "lessons"},
    "playground/transformer": {"common", "lessons"},
    "playground/figures": {"common", "lessons", "figures"},
    "playground/exercises": {"exercises"},
    "playground/exercises/judging": {"common", "figures", "exercises"},
    "playground/exercises/judging/checks": {"common", "exercises"},
}


def room_of(module):
    """Return the folder of the course that a module is in, or None if it is not of the course."""
    first = module.split(".")[0]
    if first in ("common", "figures"):
        return first
    if first in LESSONS:
        return "lessons"
    return "exercises" if first in ("check", "judging") else None


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_no_import_runs_back_up(folder):
    """Instruments know no lessons, lessons know no tools, and common/ knows nothing else."""
    for path in (ROOT / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.Import):
                modules = [each.name for each in node.names]
            if isinstance(node, ast.ImportFrom):
                modules = [node.module]
            rooms = {room_of(module) for module in modules} - {None}
            assert rooms <= MAY_IMPORT[folder], f"{path.name} imports {modules}"
            if PATHS.get(path.stem) == path and path.stem != "three_axes":
                assert "lessons" not in rooms, f"{path.name} imports {modules}"
            if PATHS.get(path.stem) == path and "common" in rooms:
                names = {each.name for each in node.names}
                assert names == {"flags"} or modules[0] in ("common.data", "common.models")
                assert rooms == {"common"}
