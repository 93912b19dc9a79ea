"""The workflow that runs the tests elsewhere, and lessons on a machine that is not Linux."""

import re

import pytest
from conftest import ROOT, SHORT, by_torchrun, epochs, lesson_path, one_process, talks, train
from lessons import LESSONS
from smoke import first_command

WORKFLOW = ROOT / ".github" / "workflows" / "tests.yml"


def test_the_oldest_pytorch():
    """CI runs the quick tests with the oldest PyTorch that requirements.txt allows."""
    oldest = (ROOT / "tests" / "oldest.txt").read_text()
    requirements = (ROOT / "requirements.txt").read_text()
    assert "tests/oldest.txt" in WORKFLOW.read_text()
    for name in ("torch", "torchvision"):
        version = re.search(rf"^{name}==([\d.]+)", oldest, re.M)[1]
        lowest = re.search(rf"^{name}>=([\d.]+)", requirements, re.M)[1]
        assert version == lowest or version.startswith(f"{lowest}.")


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_smoke_run_of_a_lesson(lesson):
    """Its command starts the lesson on the CPU, and a lesson that trains does it for an epoch."""
    words, _ = first_command(lesson)
    assert str(lesson_path(lesson).relative_to(ROOT)) in words
    assert words[words.index("--device") + 1] == "cpu"
    assert ("--epochs" in words) != talks(lesson)
    if not talks(lesson):
        assert words[words.index("--dataset") + 1] in ("digits", "fake")


ELSEWHERE = """
import builtins
import os
import sys

open_file = builtins.open


def open_elsewhere(file, *args, **options):
    if str(file).startswith("/proc"):
        raise FileNotFoundError(file)
    return open_file(file, *args, **options)


builtins.open = open_elsewhere
sys.platform = "darwin"
del os.sched_getaffinity
"""


@pytest.mark.parametrize(
    "lesson", ["single_gpu", "distributed_data_parallel", "distributed_data_parallel_torchrun"]
)
def test_a_lesson_needs_nothing_that_only_linux_has(lesson, tmp_path):
    """Without /proc and sched_getaffinity, on a system that says that it is macOS."""
    text = lesson_path(lesson).read_text()
    before = "\nsys.path."  # PyTorch is imported above, and what is ours below
    assert text.count(before) == 1
    copy = tmp_path / f"{lesson}.py"
    copy.write_text(text.replace(before, ELSEWHERE + before))
    done = train(copy, *SHORT, processes=2 if by_torchrun(lesson) else None, cold=True)
    assert epochs(done.stdout) == one_process(*SHORT)
