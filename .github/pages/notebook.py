"""Make run/notebook.ipynb, the first ten lessons as a notebook, from their docstrings.

python notebook.py
"""

import re
import sys

import nbformat
from nbformat import v4
from pages import COURSE, Course

NOTEBOOK = COURSE / "run/notebook.ipynb"
INTRODUCTION = """\
# The PyTorch distributed playground

The first lessons, with their own commands. They run with two GPUs (such as Kaggle's two T4), with
one (such as Colab's; then several processes share the CPU) and without any. On Kaggle, first turn
on "Internet" in the settings of the notebook. Run the cells from the top."""
SETUP = """\
REPOSITORY = ""  # <- the address of the repository, such as https://github.com/you/your-copy

import os

import torch


class Stop(Exception):
    def _render_traceback_(self):
        return [str(self)]  # this alone is shown


version = torch.__version__
if tuple(map(int, version.split(".")[:2])) < (2, 9):
    raise Stop(f"The lessons need PyTorch 2.9 or newer, and this is {version}.")
if os.path.exists("../playground") and not os.path.exists("playground"):
    %cd -q ..
if not os.path.exists("playground"):
    if not REPOSITORY:
        raise Stop("Write the address of the repository in the first line of this cell.")
    !test -d course || git clone -q --depth 1 {REPOSITORY} course
    if not os.path.exists("course"):
        raise Stop(f"{REPOSITORY} could not be cloned.")
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

The files in `playground/` have the code. Their docstrings also have exercises, and
`playground/README.md` lists all lessons. A T4 has no bfloat16 of its own: there, run
`playground/transformer/mixed_precision.py` with `--precision float16`."""


def cells(course: Course, lesson) -> list:
    """Return the cells of a lesson: what it is, a cell for each command, and the idea."""
    sections = course.sections(lesson)
    head, _, lead = lesson.title.partition(": ")
    text = f"## {head}\n\n" + f"`{lesson.file}`" + f": {lead}" * bool(lead) + "."
    result = [v4.new_markdown_cell(text)]
    commands = re.findall(r"^ +((?:python|torchrun) .*(?:\\\n.*)*)", sections["run"], re.M)
    for command in commands:
        command = re.sub(r" *\\\n *| {2,}#.*", " ", command).strip()
        alone = lesson.path.stem in ("single_gpu", "model_parallel")
        result.append(v4.new_code_cell(f"!{command}" + " {device}" * (not alone)))
    course.explained = set(course.tips.values())  # a notebook has no tips
    idea = course.prose(lesson, sections["idea"])
    idea = re.sub(r"\[([^]]*)\]\((?!http)[^)]*\)", r"\1", idea).strip()
    return [*result, v4.new_markdown_cell(idea)]


def make():
    """Return the notebook."""
    course = Course()
    notebook = v4.new_notebook()
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    notebook.cells = [v4.new_markdown_cell(INTRODUCTION)]
    notebook.cells += [v4.new_code_cell(SETUP), v4.new_code_cell(DEVICE)]
    for lesson in course.parts["The playground"]:
        if lesson.path.stem != "distributed_data_parallel2":  # it needs detectron2
            notebook.cells += cells(course, lesson)
    notebook.cells.append(v4.new_markdown_cell(END))
    for number, cell in enumerate(notebook.cells):
        cell.id = str(number)  # not a random one, so that git sees only what has changed
    return notebook


if __name__ == "__main__":
    nbformat.write(make(), sys.argv[1] if sys.argv[1:] else NOTEBOOK)
