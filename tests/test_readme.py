"""The pages and the docstrings tell the truth: their commands are run, and their output compared.

`test_run_readme.py` does the same for run/README.md.
"""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import (
    FEWER,
    ROOT,
    Job,
    Lesson,
    epochs,
    free_port,
    lesson_path,
    python_path,
    ranks,
    single_gpu,
    talks,
)
from lessons import LESSONS

from common.models import MODELS

LAUNCHERS = "run/README.md"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for folder in ("", "playground", "playground/pages", "run", "tests")
    for path in sorted((ROOT / folder).glob("*.md"))
}
README = PAGES["README.md"]
MEASURED = PAGES["playground/pages/measured.md"]
BLOCK = r"^```console\n(.*?)^```$"
BLOCKS = [
    pytest.param(block, id=f"{page}: {block.partition('$ ')[2].splitlines()[0][:60]}")
    for page, text in PAGES.items()
    if page != LAUNCHERS
    for block in re.findall(BLOCK, text, re.M | re.S)
]
PARITY_FLAGS = "--dataset digits --batch_size 120 --epochs 2"
PROGRAMS = f"{Path(sys.executable).parent}:/usr/bin:/bin"
NUMBER = r"-?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[+-]?\d+)?"


def docstring(lesson):
    """Return what a lesson says about itself."""
    return ast.get_docstring(ast.parse(lesson_path(lesson).read_text()))


def described_commands(lesson):
    """Return the commands in a lesson's docstring that start it, each in one line."""
    text = re.sub(r" *\\\n +", " ", docstring(lesson))
    found = re.findall(rf"^ +((?:\w+=\S+ )*(?:python|torchrun) .*\b{lesson}\.py.*)$", text, re.M)
    return [command.partition("  #")[0].strip() for command in found]


# What a lesson's docstring names first. (A learner's copy of a lesson names another file.)
COMMANDS = {lesson: described_commands(lesson)[:1] for lesson in LESSONS}


def commands(block):
    """Split a console block into (prompt, command, lines of output), with variables filled in."""
    found = []
    variables = {}
    for line in block.replace(" \\\n    ", " ").splitlines():
        prompt = re.match(r"(node\d)?\$ (.*)", line)
        assignment = re.match(r'\$ (\w+)="(.*)"$', line)
        if assignment:
            variables[f"${assignment[1]}"] = assignment[2]
        elif prompt:
            command = prompt[2]
            for name, value in variables.items():
                command = command.replace(name, value)
            found.append((prompt[1], command, []))
        else:
            found[-1][2].append(line)
    return found


def start(command, mnist):
    """Start a command of a page in the checkout. Returns its Job, and the grep behind it."""
    command, _, grep = command.partition(" | ")
    words = shlex.split(command.replace("10.0.0.1", "127.0.0.2"))
    if "--dataset" not in command:
        words += ["--data_dir", str(mnist)]
    forked = words[0] == "python" and re.search(r"playground/\w+\.py", command) is not None
    if forked:
        words.pop(0)
    return Job(*words, cwd=ROOT, env={"PATH": PROGRAMS}, cold=not forked), shlex.split(grep)


def masked(line):
    """Replace what differs from run to run: times, process ids, hosts, float32's numbers."""
    line = re.sub(r"^((?:node\d: )?\d+ +\d+ +\d+ +\S+) +\d+ +\S+$", r"\1 PID HOST", line)
    line = re.sub(r"^node\d: error", "NODE: error", line)  # either node may be first
    line = re.sub(r"(tcp://[\d.]+):\d+", r"\1:PORT", line)
    line = re.sub(r"train [\d.]+%  test [\d.]+%", "ACCURACIES", line)
    line = re.sub(r"loss \d+\.\d{4}  ", "LOSS  ", line)  # the twelve digits of --double stay
    return re.sub(r"[\d.,]+ (s|images/s)\b", r"# \1", line)


def compare(job, grep, shown):
    """Wait for the end of a command, and compare what it prints, after grep if there is one."""
    done = job.wait()
    out = done.stdout
    if grep:
        out = subprocess.run(grep, input=out, text=True, capture_output=True).stdout
    lines = []
    runs = []  # a script shows what it runs
    for line in (out + done.stderr).splitlines():
        if line.startswith("+ "):
            runs.append(line)
        elif line.strip() and "peer ranks" not in line:  # torch 2.9 tells when gloo has connected
            lines.append(line)
    if not shown:
        return
    if shown[0].startswith("+ "):
        assert runs[0].startswith(shown[0])  # the test adds a folder for the data
        shown = shown[1:]
    if shown[0] == "...":
        shown = shown[1:]
        lines = lines[-len(shown) :]
    assert [masked(line) for line in lines] == [masked(line) for line in shown]
    printed = epochs("\n".join(lines))
    for got, expected in zip(printed, epochs("\n".join(shown)), strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], abs=2e-3)
        assert got["test"] == pytest.approx(expected["test"], abs=0.5)


@pytest.mark.quick
@pytest.mark.parametrize("block", BLOCKS)
def test_console_block(block, request):
    """Run a block's commands, those of several nodes together, and compare all printed lines.

    The nodes get a free port, because another program may use the lessons' default port.
    """
    mnist = None if "--dataset" in block else request.getfixturevalue("mnist")
    port = free_port()
    running = []
    for prompt, command, shown in commands(block):
        if " -n 2 " in command:
            command += f" --port {port}"
        running.append((*start(command, mnist), shown))
        if not prompt:  # the next command is typed afterwards
            compare(*running.pop())
    for each in running:
        compare(*each)


def test_every_console_block_is_found():
    """Every block of every page is here, except those of run/README.md."""
    counts = [text.count("```console\n") for page, text in PAGES.items() if page != LAUNCHERS]
    assert len(BLOCKS) == sum(counts)
    assert README.count("```console\n") >= 4


def can_run(command):
    """Whether one machine without a GPU and without internet access can run a command alone."""
    others = ("<", "NODE0=", "RANK=", " cuda", "--gpu_ids", "--pretrained")
    return not any(word in command for word in others)


def shape(line):
    """Reduce a printed line to what is the same in each run: its words, not its numbers."""
    line = re.sub(r"\|[\w.]+\|$", "|TIMELINE|", line.strip())
    row = re.match(r"\d+ +\d+ +\d+ +(cpu|cuda:\d) +\d+ +\S+$", line)
    if row:
        return f"a row of the table of ranks, {row[1]}"
    line = re.sub(r"\bmnist\b", "digits", line)  # the commands are run on less than they show
    return " ".join(re.sub(NUMBER, "#", line).split())


def less_data(lesson, words):
    """Return flags for small data and one epoch, where a described command names neither."""
    if talks(lesson):
        return []
    flags = []
    if "resnet" in lesson:
        flags += ["--dataset", "fake"]
    elif "--dataset" not in words:
        flags += ["--dataset", "digits"]
    if "--epochs" not in words:
        flags += ["--epochs", "1"]
    return flags


def start_described(lesson, path, command, folder):
    """Start a command of a docstring on small data. Returns its Jobs, one for each rank.

    Ranks need no real torchrun, unless it is to restart them.
    """
    before, _, after = command.partition(str(lesson_path(lesson).relative_to(ROOT)))
    flags = [*shlex.split(after), *less_data(lesson, command)]
    torchrun = re.fullmatch(r"torchrun --standalone --nproc-per-node (\d) ", before)
    if torchrun:
        return ranks(path, *flags, processes=int(torchrun[1]), cwd=folder)
    if before == "python ":
        return [Lesson(path, *flags, cwd=folder)]
    env = {"PATH": PROGRAMS, "PYTHONPATH": python_path(path)}
    return [Job("env", *shlex.split(before), path, *flags, env=env, cwd=folder)]


def run_described(lesson, folder):
    """Run all commands of a lesson's docstring that this machine can run. Returns their lines."""
    path = lesson_path(lesson)
    if "resnet" in lesson:
        path = folder / "resnet.py"
        path.write_text(lesson_path(lesson).read_text().replace(*FEWER))
    todo = [command for command in described_commands(lesson) if can_run(command)]
    assert todo, "no command that can be run"
    lines = []
    for command in todo:
        for job in start_described(lesson, path, command, folder):
            done = job.wait()
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            lines += (done.stdout + done.stderr).splitlines()
    return lines


def shown_output(lesson):
    """Return the lines that a docstring shows below a sentence about what the lesson prints."""
    lines = []
    paragraph = r"^((?:\S.*\n)+)\n?((?: {3,4}.*\n|\n(?= {4}))+)"
    for introduction, block in re.findall(paragraph, docstring(lesson) + "\n", re.M):
        if re.search(r"\b(prints?|shows?|counts)\b", introduction) and introduction.endswith(":\n"):
            lines += block.splitlines()
    commands = ("python ", "torchrun ", "--", "playground/")
    return [line for line in lines if not line.strip().startswith(commands)]


@pytest.mark.parametrize("lesson", LESSONS)
def test_the_docstring_of_a_lesson(lesson, tmp_path):
    """Its commands run, and together they print each line that it says it prints."""
    lines = shown_output(lesson)
    assert lines, "no output is shown"
    printed = {shape(line) for line in run_described(lesson, tmp_path)}
    printed |= {line.partition(" # s ")[0] + " ..." for line in printed}  # without its times
    for line in lines:
        assert not line.strip() or line.strip() == "..." or shape(line) in printed, line


def test_the_epochs_that_docstrings_show(mnist):
    """They are single_gpu.py's on the real images: test_parity.py runs the lessons themselves."""
    count = 0
    for lesson in LESSONS:
        if "resnet" in lesson or lesson == "mixed_precision":
            continue  # random images, and bfloat16
        shown = [line.strip() for line in shown_output(lesson)]
        model = re.findall(r"--(?:width|layers|batch_size|model) \S+", COMMANDS[lesson][0])
        words = " ".join(model).split()
        for expected in epochs("\n".join(line for line in shown if line.startswith("epoch 1/"))):
            [got] = single_gpu("--data_dir", mnist, "--epochs", 1, *words)
            assert got["loss"] == pytest.approx(expected["loss"], abs=2e-3), lesson
            assert got["test"] == pytest.approx(expected["test"], abs=0.5), lesson
            count += 1
    assert count >= 8


PARITY_ROW = r"^\| `(\w+)\.py(?: [^`]+)?`(?:, \d processes)? \| (.*) \|$"


def test_the_whole_parity_table():
    """It has every lesson that trains, except the ResNet one, and all differences are small."""
    table = MEASURED[MEASURED.index("## Parity") : MEASURED.index("### Longer")]
    rows = re.findall(PARITY_ROW, table, re.M)
    exempt = {lesson for lesson in LESSONS if talks(lesson)}
    exempt |= {"distributed_data_parallel_resnet", "expert_parallel"}
    assert {lesson for lesson, _ in rows} == set(LESSONS) - exempt
    differences = " ".join(cells for _, cells in rows).replace("|", " ").split()
    assert len(differences) >= 40
    assert max(map(float, differences)) < 1e-12


@pytest.mark.parametrize("page", ["README.md", "playground/pages/measured.md"])
def test_the_twelve_digits(page):
    """A page shows losses in float64 as single_gpu.py prints them with the flags given there."""
    text = " ".join(PAGES[page].split())
    assert PARITY_FLAGS in text
    losses = {
        f"{line['loss']:.12f}"
        for model in MODELS
        for line in single_gpu(*PARITY_FLAGS.split(), "--double", "--model", model)
    }
    shown = re.findall(r"\b\d+\.\d{12}\b", text)
    assert shown
    assert set(shown) <= losses
