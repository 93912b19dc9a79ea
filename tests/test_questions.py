"""The programs of playground/pages/questions.md print what the page shows below them."""

import contextlib
import os
import re
import runpy

import pytest
from launch import free_port
from lessons import ROOT

from watch_ranks.ranks import call

PAGE = (ROOT / "playground" / "pages" / "questions.md").read_text()
INTRODUCTION, *SECTIONS = re.split("^## ", PAGE, flags=re.M)
FENCE = "^```python\n(.*?)^```$"
[BEGIN] = re.findall(FENCE, INTRODUCTION, re.M | re.S)
END = "dist.barrier()\ndist.destroy_process_group()\n"
PROGRAMS = {}  # by their questions: the program, and what it prints
for section in SECTIONS:
    for found in re.finditer(FENCE + "\n\n((?: {4}[^\n]*\n)+)", section, re.M | re.S):
        PROGRAMS[section.partition("\n")[0]] = found.groups()


def run_program(rank, port, folder):
    """Run program.py of a folder as one of two ranks, which writes what it prints to a file."""
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    os.chdir(folder)
    with open(f"printed{rank}", "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path("program.py", run_name="__main__")


@pytest.mark.parametrize("question", PROGRAMS)
def test_a_program(question, tmp_path):
    """Two ranks run it, and rank 0 prints what is shown."""
    program, shown = PROGRAMS[question]
    (tmp_path / "program.py").write_text(BEGIN + program + END)
    call(run_program, 2, free_port(), tmp_path, group=False)
    assert (tmp_path / "printed0").read_text().split() == shown.split()


def test_every_program_is_found():
    """Each fence of the page, but that of the introduction, is a program with an output."""
    assert len(PROGRAMS) == PAGE.count("```python") - 1 >= 8
