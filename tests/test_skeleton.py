"""The lessons are one course: the same skeleton, PyTorch by its front door, tidy code."""

import ast
import re

import pytest
from conftest import LESSONS, ROOT, by_torchrun, run

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
SHARDED_OR_SPLIT = READING_ORDER[READING_ORDER.index("sharded_optimizer") :]
MOST_REPEATED = dict.fromkeys(SHARDED_OR_SPLIT, 95)
OF_TRANSFORMERS = READING_ORDER[READING_ORDER.index("mixed_precision") :]
MOST_REPEATED |= dict.fromkeys(OF_TRANSFORMERS, 100)
MOST_REPEATED["three_axes"] = 120  # it has the parts of three lessons
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


def code_lines(lesson):
    """Return the lines of a lesson after its docstring, stripped, without empty ones."""
    text = source(lesson)
    code = text[text.index('"""', 4) + 3 :]
    return [line.strip() for line in code.splitlines() if line.strip()]


def repeated_lines(lesson):
    """Return the lines of a lesson that stand in an earlier lesson, too."""
    known = set()
    for earlier in READING_ORDER[: READING_ORDER.index(lesson)]:
        known |= set(code_lines(earlier))
    return [line for line in code_lines(lesson) if line in known]


def test_every_lesson_has_its_place():
    """The reading order has all lessons."""
    assert sorted(READING_ORDER) == LESSONS


@pytest.mark.parametrize("lesson", READING_ORDER)
def test_how_much_of_a_lesson_an_earlier_one_has(lesson, record_property):
    """At most 120 lines, later 95, so that a reader finds what is new, which is marked."""
    lines = len(code_lines(lesson))
    repeated = len(repeated_lines(lesson))
    record_property(f"lines of {lesson}.py that an earlier lesson has", f"{repeated} of {lines}")
    assert repeated <= MOST_REPEATED.get(lesson, 120)
    assert lines - repeated >= 10
    if lesson not in ("blocking_p2p", "single_gpu"):  # all of them is new
        assert "# NEW: " in source(lesson)


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


@pytest.mark.parametrize("lesson", LESSONS)
def test_help_is_short(lesson):
    """--help prints what the lesson is about and its flags. The commands are in the file."""
    out = run(lesson, "--help").stdout
    first = ast.get_docstring(ast.parse(source(lesson))).partition("\n\n")[0]
    usage, about, rest = out.split("\n\n", 2)
    assert usage == f"usage: {lesson}.py [flags]"
    assert about.split() == first.split()
    assert "\n  --device {cpu,cuda}" in rest
    assert "playground/" not in rest.replace("beside playground/", "")
    assert " ".join(rest.split()).endswith("has commands to run, and what they print.")


MAY_IMPORT = {  # what stands below each folder; a lesson is a file of playground/ itself
    "common": {"common"},
    "playground/measure": {"common", "measure"},
    "playground": {"common", "measure", "lessons"},  # three_axes.py, the sum of three lessons
    "playground/figures": {"common", "measure", "lessons", "figures"},
    "playground/exercises": {"exercises"},
    "playground/exercises/solutions": set(),
    "playground/exercises/judging": {"common", "measure", "exercises"},
    "playground/exercises/judging/checks": {"common", "measure", "exercises"},
}


def room_of(module):
    """Return the folder of the course that a module is in, or None if it is not of the course."""
    first = module.split(".")[0]
    if first in ("common", "measure", "figures"):
        return first
    if first in LESSONS:
        return "lessons"
    in_exercises = list((ROOT / "playground" / "exercises").rglob(f"{first}.py"))
    return "exercises" if in_exercises else None


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
            if path.stem in LESSONS and path.stem != "three_axes":
                assert "lessons" not in rooms, f"{path.name} imports {modules}"
