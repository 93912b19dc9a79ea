"""Lessons stand by themselves: without guard rails, and in a project of a reader's own."""

import ast
import os
import re
import subprocess
import sys

import pytest
from conftest import (
    FEWER,
    LESSONS,
    SHORT,
    Lesson,
    by_torchrun,
    epochs,
    free_port,
    lesson_path,
    one_process,
    ranks,
    talks,
    train,
)

DISTRIBUTED = [
    name for name in LESSONS if "dist.init_process_group" in lesson_path(name).read_text()
]
DISTRIBUTED.append("distributed_data_parallel2")  # launch calls it
HELD = {
    "distributed_data_parallel2": 2,  # comm keeps them
    "fully_sharded_data_parallel": 1,
    "fully_sharded_checkpoints": 1,
    "hybrid_parallel": 2,
}  # groups that DTensor's caches and CommDebugMode keep


def text_of(lesson):
    """Return the source of a lesson."""
    return lesson_path(lesson).read_text().replace(*FEWER)


def without_guard_rails(text):
    """Delete what README says can be deleted: the lines of guard rails, and their imports."""
    marked = r"^.*  # guard rail: .*\n"
    imports = r"^from common\.(guard_rails|roll_call) import .*\n"
    text, count = re.subn(f"{marked}|{imports}", "", text, flags=re.M)
    assert count >= 3
    code = text[text.index('"""', 3) + 3 :]
    assert "guard" not in code and "roll_call" not in code
    return text


def flags_for(lesson, folder):
    """Return flags for a short run of a lesson."""
    own = ("--run_dir", folder / "run") if "resumable" in lesson else ()
    own += ("--out", folder / "out") if lesson == "profile_steps" else ()
    own += (
        ("--port", free_port()) if '"--port"' in text_of(lesson) else ()
    )  # without guard rails it is a fixed one
    if talks(lesson):
        return own
    if "resnet" in lesson:
        return (
            "--dataset",
            "fake",
            "--device",
            "cpu",
            "--batch_size",
            60,
            "--epochs",
            1,
            "--workers",
            1,
        )
    return (*SHORT, *own)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_without_guard_rails(lesson, tmp_path):
    """Deleted, nothing is missing: the same numbers, from two processes where there are several."""
    copy = tmp_path / f"{lesson}.py"
    copy.write_text(without_guard_rails(text_of(lesson)))
    done = train(copy, *flags_for(lesson, tmp_path), processes=2 if by_torchrun(lesson) else None)
    if not talks(lesson) and "resnet" not in lesson:
        assert epochs(done.stdout) == one_process(*SHORT)


def leaning(text):
    """Return the numbers of the code lines that name anything from common or measure."""
    tree = ast.parse(text)
    names, lines = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("common", "measure"):
            names |= {alias.asname or alias.name for alias in node.names}
            lines |= set(range(node.lineno, node.end_lineno + 1))
    return lines | {
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names
    }


@pytest.mark.parametrize("lesson", LESSONS)
def test_how_much_of_a_lesson_leans_on_this_project(lesson, record_property):
    """At most 18 lines of code, 8 in those that only talk."""
    count = len(leaning(text_of(lesson)))
    record_property(f"lines of {lesson}.py that name common or measure", count)
    assert 0 < count <= (8 if talks(lesson) else 18)


IMPORTS = "from torchvision.datasets import FakeData\nfrom torchvision.transforms import ToTensor"
DATA = (
    "    train_set, test_set = (FakeData(size, (1, 28, 28), 10, ToTensor()) for size in (600, 99))"
)
MODEL = "    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10)).to(device)"
MINE = {  # what a reader writes in place of the lines that lean on this project; empty: nothing
    r"^from common.data import .*": IMPORTS,
    r"^from common.models import .*": "",
    r"^    train_set, test_set = load\(.*": DATA,
    r"^ +collate_fn=whole_batch,  # .*\n": "",
    r"(?<= )collate_fn=whole_batch, ": "",
    r"^    model = MODELS.*": MODEL,
    r'^    add\("--model".*': "",
    r'^    add\("--data_dir".*': "",
    r"^    args.dataset = fetch\(.*": "",
    r"^sys.path.append\(.*": "",
}
LANES = {  # the same for the lanes at the end of the lessons that only talk
    r"^from measure.timeline import Calls\n": "",
    r"^ +with Calls\(\) as calls:.*\n    ": "",
    r"^ +calls\.show\(\)\n": "",
    r"^sys.path.append\(.*": "",
}


@pytest.mark.parametrize(
    "lesson",
    [
        "single_gpu",
        "distributed_data_parallel",
        "distributed_data_parallel_torchrun",
        "blocking_p2p",
    ],
)
def test_a_lesson_lifted_into_a_project_of_its_own(lesson, tmp_path):
    """In an empty folder, with those lines replaced by plain torchvision: it trains, or talks."""
    before = text_of(lesson)
    after = without_guard_rails(before)
    changed = len(leaning(before)) - len(leaning(after))
    for pattern, mine in (LANES if talks(lesson) else MINE).items():
        after, count = re.subn(pattern, mine, after, flags=re.M)
        assert count == 1, pattern
        changed += count
    assert changed <= (10 if talks(lesson) else 16)
    code = after[after.index('"""', 3) + 3 :]
    assert "common" not in code and not leaning(after)
    copy = tmp_path / "mine.py"
    copy.write_text(after)
    start = [sys.executable, "-I"]  # finds nothing beside the script and in no other folder of ours
    if by_torchrun(lesson):
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    flags = [] if talks(lesson) else ["--epochs", "2", "--batch_size", "100", "--device", "cpu"]
    flags += ["--port", str(free_port())] if '"--port"' in after else []
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "OMP_NUM_THREADS": "1"
    }
    done = subprocess.run(
        [*start, copy, *flags], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    if talks(lesson):
        assert "rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0]" in done.stdout
    else:
        assert len(epochs(done.stdout)) == 2


COUNTED = """
import functools
import glob
import os


def counted(train):
    @functools.wraps(train)
    def trained(*args):
        train(*args)
        names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
        count = sum("gloo" in name for name in names)
        os.write(1, f"gloo threads: {count}\\n".encode())  # two ranks do not mix their lines

    return trained


"""


def threads_left(lesson, text, folder):
    """Run a lesson in two processes. Returns how many of gloo's threads each has after train."""
    text, count = re.subn(r"^def (train|talk)\(", r"@counted\ndef \1(", text, flags=re.M)
    assert count == 1
    first = re.search(r"^(@record\n)?(def|@counted)", text, re.M).start()
    copy = folder / f"{lesson}.py"
    copy.write_text(text[:first] + COUNTED + text[first:])
    words = copy, *flags_for(lesson, folder)  # cold: what it imports, and when, matters
    jobs = ranks(*words, cold=True) if by_torchrun(lesson) else [Lesson(*words, cold=True)]
    done = [job.wait() for job in jobs]
    assert not any(one.returncode for one in done), done
    return [
        int(number) for one in done for number in re.findall(r"gloo threads: (\d+)", one.stdout)
    ]


@pytest.mark.parametrize("lesson", DISTRIBUTED)
def test_no_thread_of_the_group_outlives_it(lesson, tmp_path):
    """A thread that is left may abort Python's shutdown: there is none when train has returned.

    Groups of a mesh keep their three threads, which have no work any more. The run ends well.
    """
    left = threads_left(lesson, text_of(lesson), tmp_path)
    assert len(left) == 2 and max(left) <= 3 * HELD.get(lesson, 0)


def test_threads_that_are_left_are_seen(tmp_path):
    """Without the guard rails, and so without what they import early, the count finds some."""
    left = threads_left(
        "distributed_data_parallel",
        without_guard_rails(text_of("distributed_data_parallel")),
        tmp_path,
    )
    assert len(left) == 2 and min(left) > 0
