"""README's commands do what it says: each is run, and each line of output it shows is compared."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DETECTRON2, LESSONS, ROOT, STANDIN, epochs
from nodes import need

README = (ROOT / "README.md").read_text()
FIGURES = ROOT / "playground" / "figures"
COMMANDS = dict(re.findall(r"^\| \[`(\w+)\.py`\].*?\| `((?:python|torchrun) .*?)` \|", README, re.M))
BLOCKS = re.findall(r"^```console\n(.*?)^```$", README, re.M | re.S)


def commands(block):
    """Split a console block into (prompt, command, lines of output)."""
    found = []
    for line in block.splitlines():
        if prompt := re.match(r"(node\d)?\$ (.*)", line):
            found.append((prompt[1], prompt[2], []))
        else:
            found[-1][2].append(line)
    return found


def start(command, mnist):
    """Start a command of README in the checkout, with the data where the tests have it."""
    words = shlex.split(command.replace("10.0.0.1", "127.0.0.2"))
    if "playground/" in command and "--dataset" not in command and "p2p" not in command or "quickstart" in command:
        words += ["--data_dir", str(mnist)]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {"PATH": path} | ({"PYTHONPATH": str(STANDIN)} if DETECTRON2 != "the real detectron2" else {})
    return subprocess.Popen(words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def masked(line):
    """Replace what differs from run to run and from machine to machine: times, pids, hosts, losses, accuracies."""
    line = re.sub(r"^((?:node\d: )?\d+ +\d+ +\d+ +\S+) +\d+ +\S+$", r"\1 PID HOST", line)
    line = re.sub(r"node\d: error: rank \d on node\d", "NODE: error: RANK", line)  # both fail: either may be first
    line = re.sub(r"loss [\d.]+  train [\d.]+%  test [\d.]+%", "NUMBERS", line)
    return re.sub(r"[\d.,]+ (s|images/s|matrix products)\b", r"# \1", line)


@pytest.mark.parametrize("block", BLOCKS, ids=[commands(block)[0][1][:60] for block in BLOCKS])
def test_console_block(block, request):
    """Run the commands (those of several nodes at the same time) and compare what they print, line by line."""
    needs_mnist = any("--dataset" not in command and "p2p" not in command for _, command, _ in commands(block))
    mnist = request.getfixturevalue("mnist") if needs_mnist else None
    if "rehearse" in block:
        need("ip")
    together = commands(block)[0][0] is not None
    jobs = [(start(command, mnist), shown) for _, command, shown in commands(block)] if together else []
    for _, command, shown in commands(block):
        process, shown = jobs.pop(0) if together else (start(command, mnist), shown)
        out, err = process.communicate(timeout=120)
        lines = [line for line in (out + err).splitlines() if line.strip() and not line.startswith("+ ")]
        if shown[:1] == ["..."]:
            shown = shown[1:]
            lines = lines[-len(shown) :] if "torchrun" not in command else [x for x in lines if x.startswith("epoch")]
        if shown:
            assert [masked(line) for line in lines] == [masked(line) for line in shown]
        for got, expected in zip(epochs(out), epochs("\n".join(shown)), strict=True) if shown else ():
            assert got["loss"] == pytest.approx(expected["loss"], abs=2e-3)
            assert got["test"] == pytest.approx(expected["test"], abs=0.5)


def test_parity_table():
    """The table shows one loss, whatever the lesson and the number of processes; test_parity.py runs all of it."""
    rows = re.findall(r"^\| `(\w+)\.py(.*?)`.*? \| ([\d.]+) \| ([\d.]+)% \| ([\d.]+)% \| (\S+) \|$", README, re.M)
    assert {lesson for lesson, *_ in rows} == {name for name in LESSONS if "p2p" not in name and name != "compare"}
    assert len({row[2:5] for row in rows}) == 1
    assert all(float(row[5]) <= 1e-5 for row in rows)


def test_the_parity_numbers_are_those_of_a_run():
    """The table's numbers come from the last epoch of single_gpu.py with the flags that README gives."""
    flags = re.search(r"The numbers are of `(.*?)`", README)[1]
    command = f"python playground/single_gpu.py {flags}"
    out, _ = start(command, None).communicate(timeout=120)
    loss, train, test = re.search(r"^\| `single_gpu\.py` \| ([\d.]+) \| ([\d.]+)% \| ([\d.]+)%", README, re.M).groups()
    last = epochs(out)[-1]
    assert last["loss"] == pytest.approx(float(loss), abs=1e-3)
    assert last["train"] == pytest.approx(float(train), abs=0.1)
    assert last["test"] == pytest.approx(float(test), abs=0.4)


def test_every_lesson_has_a_command():
    """Each lesson has one in the lessons' table."""
    assert sorted(COMMANDS) == LESSONS


@pytest.mark.parametrize("lesson", COMMANDS)
def test_the_command_of_a_lesson_runs(lesson, tmp_path):
    """The commands of the lessons' table, on the digits."""
    short = "" if "p2p" in lesson else " --dataset digits --epochs 1"
    short += f" --run_dir {tmp_path}" if "torchrun" in lesson else ""
    short += f" --out {tmp_path} --only parity --lessons model_parallel" if lesson == "compare" else ""
    process = start(COMMANDS[lesson] + short, None)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out


def test_the_figures_are_there():
    """Each figure that README shows, and no others; each says in words what is on it."""
    shown = re.findall(r"^!\[(.{20,})\]\((playground/figures/\w+\.png)\)$", README, re.M)
    assert {path for _, path in shown} == {f"playground/figures/{path.name}" for path in FIGURES.iterdir()}
    assert all((ROOT / path).read_bytes().startswith(b"\x89PNG") for _, path in shown)


def test_the_faults_are_counted():
    """Each fault has a test, each test of test_faults.py is in the table, and the sentence above it has the sums."""
    rows = re.findall(r"^\| .* \| (\*\*survived\*\*|ends: ).* \| `(test_\w+)` \|$", README, re.M)
    text = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for _, name in rows:
        assert f"def {name}(" in text, name
    there = set(re.findall(r"^def (test_\w+)", (ROOT / "tests" / "test_faults.py").read_text(), re.M))
    assert there <= {name for _, name in rows}
    tried, survived, ended = map(
        int, re.search(r"(\d+) faults tried, .*: (\d+) are survived, .*; (\d+) end", README).groups()
    )
    assert (tried, survived) == (len(rows), [outcome for outcome, _ in rows].count("**survived**"))
    assert ended == tried - survived


def test_each_script_is_explained():
    """README names every script in run/, and the commands of the launchers' table start with what is there."""
    for path in (ROOT / "run").iterdir():
        assert f"run/{path.name}" in README or path.name == "setup.sh", path.name
    for lesson in re.findall(r"^\|.*\| `.*run/\w+\.\w+ (playground/\w+\.py)", README, re.M):
        assert (ROOT / lesson).exists()


def test_links_and_names_lead_somewhere():
    """Each file and each section that README links to or names is there, and each exercise it points at."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)$", README, re.M)
    }
    for anchor in re.findall(r"\]\(#([^)]+)\)", README):
        assert anchor in anchors, anchor
    for number, lesson in re.findall(r"break-it (\d) of `(\w+)\.py`", README):
        assert f"\n  {number}. " in (ROOT / "playground" / f"{lesson}.py").read_text()
    troubles = README[README.index("## Troubleshooting") : README.index("## Speed")]
    assert len(re.findall(r"^\| ", troubles, re.M)) - 1 >= 25
