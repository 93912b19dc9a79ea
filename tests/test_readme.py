"""The pages and the docstrings tell the truth: their commands are run, and their output compared.

`test_run_readme.py` does the same for run/README.md.
"""

import re
import shlex
import subprocess

import pytest
from launch import FEWER, Lesson, epochs, free_port, ranks, single_gpu
from lessons import LESSONS, ROOT, described_commands, docstring, lesson_path, small_data, talks
from torch.distributed.run import parse_args

PAGES = ROOT / "playground" / "pages"
MEASURED = (PAGES / "measured.md").read_text()
TEXTS = [path.read_text() for path in (ROOT / "README.md", *sorted(PAGES.glob("*.md")))]
BLOCKS = re.findall(r"^```console\n(.*?)^```$", "".join(TEXTS), re.M | re.S)


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


def start(command, *more, copy=None, folder=ROOT, env=None):
    """Start a command, or a copy of its lesson. Returns its Jobs, one for each rank of torchrun.

    The ranks need no real torchrun, because nothing restarts them. torchrun parses its own flags.
    """
    program, *words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", command))
    if program == "torchrun":
        args = parse_args(words)
        words = [args.training_script, *args.training_script_args]
    words = [str(ROOT / word) if word.startswith("playground/") else word for word in words]
    path = copy or words[0]
    if program == "torchrun":
        processes = int(args.nproc_per_node)
        return ranks(path, *words[1:], *more, processes=processes, cwd=folder, env=env)
    assert program == "python", command
    return [Lesson(path, *words[1:], *more, cwd=folder, env=env)]


def masked(line):
    """Replace what differs from run to run: times, process ids, hosts, float32's numbers."""
    line = re.sub(r"^((?:node\d: )?\d+ +\d+ +\d+ +\S+) +\d+ +\S+$", r"\1 PID HOST", line)
    line = re.sub(r"^node\d: error", "NODE: error", line)  # either node may be first
    line = re.sub(r"(tcp://[\d.]+):\d+", r"\1:PORT", line)
    line = re.sub(r"train [\d.]+%  test [\d.]+%", "ACCURACIES", line)
    line = re.sub(r"loss \d+\.\d{4}  ", "LOSS  ", line)  # the twelve digits of --double stay
    return re.sub(r"[\d.,]+ (s|images/s)\b", r"# \1", line)


def compare(jobs, grep, shown):
    """Wait for the end of a command, and compare what it prints, after grep if there is one."""
    done = [job.wait() for job in jobs]
    out = "".join(each.stdout for each in done)
    if grep:
        out = subprocess.run(shlex.split(grep), input=out, text=True, capture_output=True).stdout
    lines = (out + "".join(each.stderr for each in done)).splitlines()
    # torch 2.9 tells when gloo has connected to its peer ranks.
    lines = [line for line in lines if line.strip() and "peer ranks" not in line]
    if not shown:
        return
    if shown[0] == "...":
        shown = shown[1:]
        lines = lines[-len(shown) :]
    assert [masked(line) for line in lines] == [masked(line) for line in shown]
    for got, expected in zip(epochs("\n".join(lines)), epochs("\n".join(shown)), strict=True):
        agree(got, expected)


def agree(got, expected):
    """Check the numbers of an epoch, which rounding in float32 may move a little."""
    assert got["loss"] == pytest.approx(expected["loss"], abs=2e-3)
    assert got["test"] == pytest.approx(expected["test"], abs=0.5)


@pytest.mark.quick
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.partition("\n")[0][:60])
def test_console_block(block, request):
    """Run a block's commands, those of several nodes together, and compare all printed lines.

    The nodes get a free port, because another program may use the lessons' default port. What
    run/quickstart.sh runs is in its second line; test_run_scripts.py checks that it does.
    """
    more = [] if "--dataset" in block else ["--data_dir", request.getfixturevalue("mnist")]
    more += ["--port", free_port()] if " -n 2 " in block else []
    running = []
    for prompt, command, shown in commands(block):
        if command == "run/quickstart.sh":
            _, command, *shown = shown
            command = command.removeprefix("+ ")
        command, _, grep = command.replace("10.0.0.1", "127.0.0.2").partition(" | ")
        running.append((start(command, *more), grep, shown))
        if not prompt:  # the next command is typed afterwards
            compare(*running.pop())
    for each in running:
        compare(*each)


@pytest.mark.quick
def test_the_table_of_equal_losses():
    """Each command of README.md's table prints the digits beside it."""
    text = (ROOT / "README.md").read_text()
    flags = re.search(r"Add `(--double .*)` to each:\n\n\| trained by", text)[1].split()
    rows = re.findall(r"^\| .* \| `(.*)` \| \*\*(\d\.\d{12})\*\* \|$", text, re.M)
    assert len(rows) == 5
    for command, digits in rows:
        printed = [job.wait().stdout for job in start(command, *flags)]
        assert f"epoch 2/2  loss {digits} " in printed[0], command


def test_every_console_block_is_found():
    """The blocks of all pages; the exercises and run/README.md have tests of their own."""
    assert len(BLOCKS) == "".join(TEXTS).count("```console\n") >= 3


def can_run(command):
    """Whether one machine without a GPU and without internet access can run a command alone."""
    others = ("<", "NODE0=", "RANK=", " cuda", "--pretrained", "--join")
    return not any(word in command for word in others)


def shape(line):
    """Mask what less data or another machine changes: an epoch's numbers, times, shares."""
    line = re.sub(r"^(\d+ +\d+ +\d+ +cpu) +\d+ +\S+$", r"\1", line.strip())
    line = re.sub(r"process \d+ on \S+,", "process # on #,", line)
    line = re.sub(r"^process \d+:", "process #:", line)
    if "epoch" in line:
        line = re.sub(r"\d[\d,.]*", "#", line.replace("mnist", "digits"))
    line = re.sub(r"[\d,]+ \+ [\d,]+", "# + #", line)  # tokens and padding of a text
    return " ".join(re.sub(r"[\d.]+(?=%| s\b)|\b\d+\.\d\d\b", "#", line).split())


def less_data(lesson, words):
    """Return flags for a short run: small data and one epoch, if a command names neither."""
    if talks(lesson):
        return []
    flags = [] if "--epochs" in words else ["--epochs", "1"]
    if "--dataset" not in words:
        flags += ["--dataset", small_data(lesson)]
    return [*flags, "--workers", "0"] if "resnet" in lesson else flags


def run_described(lesson, folder):
    """Run all commands of a lesson's docstring that this machine can run. Returns their lines."""
    copy = None
    if "resnet" in lesson:
        copy = folder / "resnet.py"
        copy.write_text(lesson_path(lesson).read_text().replace(*FEWER))
    todo = [command for command in described_commands(lesson) if can_run(command)]
    assert todo, "no command that can be run"
    lines = []
    for command in todo:
        flags = less_data(lesson, command)
        for job in start(command, *flags, copy=copy, folder=folder, env={"DOCUMENTS": "40"}):
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
    commands = ("python ", "torchrun ", "git ", "--", "playground/")
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
            agree(single_gpu("--data_dir", mnist, "--epochs", 1, *words)[0], expected)
            count += 1
    assert count >= 8


@pytest.mark.quick
def test_the_program_about_the_text(capsys):
    """It prints what text.md shows below it. Another Python's text has other numbers."""
    page = (PAGES / "text.md").read_text()
    [(program, shown)] = re.findall(r"^```python\n((?:.*\n)+?)```\n\n((?: {4}.*\n)+)", page, re.M)
    exec(program, {})
    printed = capsys.readouterr().out
    number = r"\d+(?:\.\d+)?"
    assert re.sub(number, "#", printed).split() == re.sub(number, "#", shown).split()
    numbers, expected = [list(map(float, re.findall(number, out))) for out in (printed, shown)]
    assert numbers == pytest.approx(expected, rel=0.15)


def test_the_twelve_digits():
    """measured.md shows losses in float64 as single_gpu.py prints them with the flags there."""
    text = " ".join(MEASURED.split())
    flags = "--dataset digits --batch_size 120 --epochs 2"
    assert flags in text
    losses = set()
    for model in ("mlp", "transformer"):
        for line in single_gpu(*flags.split(), "--double", "--model", model):
            losses.add(f"{line['loss']:.12f}")
    shown = re.findall(r"\b\d+\.\d{12}\b", text)
    assert shown and set(shown) <= losses
