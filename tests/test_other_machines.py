"""The workflow that runs the tests elsewhere, and lessons on a machine that is not Linux."""

import re

from conftest import ROOT, SHORT, epochs, lesson_path, one_process, run, talks
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


def test_the_smoke_run_of_each_lesson():
    """Its command starts the lesson on the CPU, and a lesson that trains does it for an epoch."""
    for lesson in LESSONS:
        words = " ".join(first_command(lesson)[0])
        assert str(lesson_path(lesson).relative_to(ROOT)) in words and "--device cpu" in words
        assert talks(lesson) or re.search("--dataset (digits|fake|text) .*--epochs 1$", words)


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


def test_a_lesson_needs_nothing_that_only_linux_has(tmp_path):
    """Without /proc and sched_getaffinity, on a system that says that it is macOS."""
    text = lesson_path("distributed_data_parallel").read_text()
    before = "\nsys.path."  # PyTorch is imported above, and what is ours below
    assert text.count(before) == 1
    copy = tmp_path / "distributed_data_parallel.py"
    copy.write_text(text.replace(before, ELSEWHERE + before))
    assert epochs(run(copy, *SHORT).stdout) == one_process(*SHORT)
