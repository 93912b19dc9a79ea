"""Make run/notebook.ipynb, the short path as a notebook, from the docstrings of its lessons.

python notebook.py
"""

import re
import sys

import nbformat
from nbformat import v4
from pages import COURSE, REPOSITORY, Course

NOTEBOOK = COURSE / "run/notebook.ipynb"
INTRODUCTION = """\
# The short path through distributed PyTorch

The lessons of the short path, with their own commands. They run with two GPUs (such as Kaggle's two
T4), with one (such as Colab's) and without any. On Kaggle, first turn on "Internet" in the
settings of the notebook. Run the cells from the top."""
SETUP = """\
import os

import torch

version = torch.__version__
if tuple(map(int, version.split(".")[:2])) < (2, 9):
    raise SystemExit(f"the course needs PyTorch 2.9 or newer, and this is {version}")
if not os.path.exists("playground"):
    address = "https://github.com/OWNER/NAME"  # of the repository in which you found this notebook
    !git clone -q --depth 1 {address} course
    %cd -q course
# This installs only what is missing, and leaves PyTorch as it is.
!python -m pip install -q -r requirements.txt"""
DEVICE = """\
# Several processes need as many GPUs, or the CPU.
gpus = torch.cuda.device_count()
device = "--device cpu" if gpus == 1 else ""
print(gpus, "GPUs", device)"""
END = """\
## More lessons

The files in `playground/` have the code. Their docstrings also have questions, and `README.md`
lists the other lessons. A T4 has no bfloat16 of its own: there, run `mixed_precision.py` with
`--precision float16`."""


def cells(course: Course, lesson) -> list:
    """Return the cells of a lesson: what it is, a cell for each command, and the idea."""
    sections = course.sections(lesson)
    head, _, lead = lesson.title.partition(": ")
    text = f"## {head}\n\n" + f"`{lesson.file}`" + f": {lead}" * bool(lead) + "."
    result = [v4.new_markdown_cell(text)]
    commands = re.findall(r"^ +((?:python|torchrun) .*(?:\\\n.*)*)", sections["run"], re.M)
    for command in commands:
        command = re.sub(r" *\\\n *| {2,}#.*", " ", command).strip()
        several = "" if lesson.path.stem == "single_gpu" else " {device}"
        result.append(v4.new_code_cell(f"!{command}{several}"))
    idea = course.prose(
        lesson, sections["idea"].partition("On two nodes")[0], set(course.tips.values())
    )
    idea = re.sub(r"\[([^]]*)\]\((?!http)[^)]*\)", r"\1", idea).strip()
    return [*result, v4.new_markdown_cell(idea)]


def make():
    """Return the notebook."""
    course = Course()
    setup = SETUP.replace("OWNER/NAME", REPOSITORY) if REPOSITORY else SETUP
    notebook = v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    notebook.cells = [v4.new_markdown_cell(INTRODUCTION)]
    notebook.cells += [v4.new_code_cell(setup), v4.new_code_cell(DEVICE)]
    for lesson in course.lessons:
        if course.parts[lesson.file][1]:
            notebook.cells += cells(course, lesson)
    notebook.cells.append(v4.new_markdown_cell(END))
    for number, cell in enumerate(notebook.cells):
        cell.id = str(number)  # not a random one, so that git sees only what has changed
    return notebook


if __name__ == "__main__":
    nbformat.write(make(), sys.argv[1] if sys.argv[1:] else NOTEBOOK)
