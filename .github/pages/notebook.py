"""Make run/notebook.ipynb, a notebook of the first ten lessons, from their files.

python notebook.py

It keeps the address in the notebook's first cell of code. With one, names of files are links.
"""

import os
import re

import nbformat
from nbformat import v4
from pages import COURSE, EXERCISES, Course, Source

NOTEBOOK = COURSE / "run/notebook.ipynb"
INTRODUCTION = """\
# The PyTorch distributed playground

The first lessons, with their commands and code, and an exercise. They run with two GPUs (such as
Kaggle's two T4), with one (such as Colab's; then several processes share the CPU) and without any.
On Kaggle, first turn on "Internet" in the settings. Run the cells from the top. On two CPU cores,
most commands take ten to twenty seconds, and one takes half a minute."""
SETUP = """\
REPOSITORY = ""  # <- the address of the repository, such as https://github.com/you/your-copy

import os
import re

import torch
from IPython.core.magic import register_cell_magic
from IPython.display import SVG, Code


class Stop(Exception):
    def _render_traceback_(self):
        return [str(self)]  # this alone is shown


def show(file):
    # A lesson's code, without its docstring and what earlier lessons have shown.
    code = open(file).read().partition('\\n\"""\\n')[2]
    return Code(code.partition("# ---------- Unchanged")[0].strip(), language="python")


@register_cell_magic
def changed(command, code):
    # Run a copy of a lesson in which this code comes last, so it replaces what has its name.
    lesson = re.search(r"playground/\\w+\\.py", command)[0]
    before, start, end = open(lesson).read().rpartition("\\nif __name__ ==")
    open("playground/broken.py", "w").write(before + "\\n" + code + start + end)
    get_ipython().system(command.replace(lesson, "playground/broken.py"))


if os.path.exists("../playground") and not os.path.exists("playground"):
    %cd -q ..
if not REPOSITORY and not os.path.exists("playground"):
    raise Stop("Write the address of the repository in the first line of this cell.")
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9):
    raise Stop(f"The lessons need PyTorch 2.9 or newer, and this is {torch.__version__}.")
if not os.path.exists("playground"):
    !test -d course || git clone -q --depth 1 {REPOSITORY} course
    if not os.path.exists("course"):
        raise Stop(f"{REPOSITORY} could not be cloned.")
    %cd -q course
# This installs only what is missing, and leaves PyTorch as it is.
!python -m pip install -q -r requirements.txt

# Several processes need as many GPUs, or the CPU. (run/one_gpu.sh lets them share a GPU.)
gpus = torch.cuda.device_count()
device = "--device cpu" if gpus == 1 else ""
print(gpus, "GPUs", device)"""
END = """\
## Where to go next

[`playground/README.md`](README.md) lists all lessons, [`playground/exercises/`](exercises) has more
exercises, and [`playground/pages/choosing.md`](pages/choosing.md) says which kind of parallelism
solves which problem. A T4 has no bfloat16 of its own: there, run
`playground/transformer/mixed_precision.py` with `--precision float16`."""

IDEAS = {  # a function of each lesson that one can change in the notebook
    "blocking_p2p": "relay",
    "nonblocking_p2p": "nonblocking",
    "collectives": "all_reduce",
    "single_gpu": "run_epoch",
    "data_parallel": "train",
    "manual_data_parallel": "average_gradients",
    "distributed_data_parallel": "train",
    "distributed_data_parallel_torchrun": "join",
    "model_parallel": "TwoStages",
}


def cells(course: Course, lesson: Source) -> list:
    """Return the cells of a lesson: what it is, its commands, the idea, and the code."""
    course.explained = set(course.tips.values())  # a notebook has no tips
    sections = course.sections(lesson)
    run, idea = (course.prose(lesson, sections[name]) for name in ("run", "idea"))
    before, commands, after = re.split("```console\n(.*?)```", run, maxsplit=1, flags=re.S)
    head, _, lead = lesson.title.partition(": ")
    lead = f"[`{lesson.file}`]({lesson.path.name})" + f": {lead}" * bool(lead)
    result = [v4.new_markdown_cell(f"## {head}\n\n{lead}.\n\n{before}")]
    device = "" if lesson.path.stem in ("single_gpu", "model_parallel") else " {device}"
    commands = re.findall(r"^\$ (.*?)(?: +#.*)?$", commands, re.M)
    result += [v4.new_code_cell(f"!{command}{device}") for command in commands]
    parts = re.split(r"!\[[^]]*\]\((.*?)\)", re.sub("</?div.*?>\n*", "", after + idea))
    for text, picture in zip(parts[::2], [*parts[1::2], None], strict=True):
        shown = f'SVG("playground/{picture}")' if picture else f'show("{lesson.file}")'
        result += [v4.new_markdown_cell(text), v4.new_code_cell(shown)]
    name = IDEAS[lesson.path.stem]
    text = "\n".join(lesson.lines)
    code = re.search(rf"^(?:def|class) {name}\b.*?(?=\n\n\n)", text, re.M | re.S)[0]
    comment = "# Change this, and run the cell.\n"
    result.append(v4.new_code_cell(f"%%changed {commands[0]}{device}\n{comment}{code}"))
    broken = sections["broken"].replace("Try breaking it, in", "In", 1)
    questions = course.prose(lesson, broken).replace('<details class="more">', "<details>")
    return [*result, v4.new_markdown_cell(f"### Try breaking it\n\n{questions}")]


def exercise(course: Course, task: Source) -> list:
    """Return the cells of an exercise: the task, one to write in, and one that checks it."""
    what = re.search("^Write .*?(?=^The first check)", task.doc, re.M | re.S)[0]
    text = f"### Exercise: {task.title}\n\n{course.prose(task, what)}"
    text += "Write it in the next cell. Run that cell, and the one below it, which checks it."
    code = "\n".join(task.lines[task.first - 1 :]).replace("from check import check\n", "")
    code = f"%%writefile /tmp/{task.path.name}\n" + code.partition("\n\n\nif __name__")[0]
    check = "# For help, add --trace, --hint 1 (also 2 and 3) or --answer.\n"
    check += f"!python {EXERCISES}/check.py {task.path.stem} --file /tmp/{task.path.name}"
    return [v4.new_markdown_cell(text), v4.new_code_cell(code), v4.new_code_cell(check)]


def make():
    """Return the notebook."""
    course = Course()
    course.drawn = set()  # no picture has been shown yet
    files = {source.page: source.file for source in course.sources}
    address = re.match('REPOSITORY = "(.*?)"', nbformat.read(NOTEBOOK, 4).cells[1].source)[1]
    made = v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    setup = v4.new_code_cell(SETUP.replace('""', f'"{address}"', 1))
    made.cells = [v4.new_markdown_cell(INTRODUCTION), setup]
    for lesson in course.parts["The playground"]:
        if lesson.path.stem != "distributed_data_parallel2":  # it needs detectron2
            made.cells += cells(course, lesson)
        if lesson.path.stem == "blocking_p2p":
            made.cells += exercise(course, course.tasks["The playground"][0])
    made.cells.append(v4.new_markdown_cell(END))

    def link(match: re.Match) -> str:
        path = os.path.normpath(f"playground/{match[2]}")
        return f"[{match[1]}]({address}/blob/main/{files.get(path, path)})" if address else match[1]

    for number, cell in enumerate(made.cells):
        cell.id = str(number)  # not a random one, so that git sees only what has changed
        if cell.cell_type == "markdown":
            cell.source = re.sub(r"\[([^]]*)\]\((?!http)([^)]*)\)", link, cell.source).strip()
    return made


if __name__ == "__main__":
    nbformat.write(make(), NOTEBOOK)
