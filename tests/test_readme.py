"""The READMEs' commands do what they say: each is run, and each line of output it shows is compared."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DETECTRON2, LESSONS, ROOT, STANDIN, epochs, talks
from nodes import need

FOLDERS = (".", "playground", "tests", "run")
READMES = {folder: (ROOT / folder / "README.md").read_text() for folder in FOLDERS if folder != "run"}
LAUNCHERS = ROOT / "run" / "README.md"
README, LESSONS_README, TESTS_README = READMES.values()
WORD = r"(?:[A-Z_]+=\S+ )*(?:python|torchrun) "
COMMANDS = dict(re.findall(rf"^\| \[`(\w+)\.py`\].*\| `({WORD}.*?)` \|$", README, re.M))
BLOCKS = [
    pytest.param(block, id=f"{folder}: {block.partition('$ ')[2].splitlines()[0][:60]}")
    for folder, text in READMES.items()
    for block in re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S)
]
PARITY = r"^\| `(\w+)\.py(.*?)`(.*?) \| ([\d.]+) \| ([\d.]+)% \| ([\d.]+)% \| (\S+) \| ([\d.]+) \| (\S+) \|$"


def commands(block):
    """Split a console block into (prompt, command, lines of output)."""
    found = []
    for line in block.splitlines():
        if prompt := re.match(r"(node\d)?\$ (.*)", line):
            found.append((prompt[1], prompt[2], []))
        else:
            found[-1][2].append(line)
    return found


def trains(command):
    """Whether a command runs a lesson that trains, or what else a README may show."""
    return not any(talks(lesson) for lesson in re.findall(r"playground/(\w+)\.py", command))


def start(command, mnist):
    """Start a command of a README in the checkout, with the data where the tests have it."""
    words = shlex.split(command.replace("10.0.0.1", "127.0.0.2"))
    if "playground/" in command and "--dataset" not in command and trains(command) or "quickstart" in command:
        words += ["--data_dir", str(mnist)]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    env = {"PATH": path} | ({"PYTHONPATH": str(STANDIN)} if DETECTRON2 != "the real detectron2" else {})
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    return subprocess.Popen(words, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def masked(line):
    """Replace what differs from run to run and from machine to machine: times, pids, hosts, losses, accuracies."""
    line = re.sub(r"^((?:node\d: )?\d+ +\d+ +\d+ +\S+) +\d+ +\S+$", r"\1 PID HOST", line)
    line = re.sub(r"^node\d: error", "NODE: error", line)  # either may be first
    line = re.sub(r"loss [\d.]+  train [\d.]+%  test [\d.]+%", "NUMBERS", line)
    return re.sub(r"[\d.,]+ (s|images/s|matrix products)\b", r"# \1", line)


@pytest.mark.quick
@pytest.mark.parametrize("block", BLOCKS)
def test_console_block(block, request):
    """Run the commands (those of several nodes at the same time) and compare what they print, line by line."""
    needs_mnist = any("--dataset" not in command and trains(command) for _, command, _ in commands(block))
    mnist = request.getfixturevalue("mnist") if needs_mnist else None
    if "rehearse" in block:
        need("ip")
    together = commands(block)[0][0] is not None
    jobs = [(start(command, mnist), shown) for _, command, shown in commands(block)] if together else []
    for _, command, shown in commands(block):
        process, shown = jobs.pop(0) if together else (start(command, mnist), shown)
        out, err = process.communicate(timeout=300)
        lines = [line for line in (out + err).splitlines() if line.strip() and not line.startswith("+ ")]
        if shown[:1] == ["..."]:
            shown = shown[1:]
            lines = lines[-len(shown) :]
        if shown:
            assert [masked(line) for line in lines] == [masked(line) for line in shown]
        for got, expected in zip(epochs(out), epochs("\n".join(shown)), strict=True) if shown else ():
            assert got["loss"] == pytest.approx(expected["loss"], abs=2e-3)
            assert got["test"] == pytest.approx(expected["test"], abs=0.5)


def test_every_console_block_is_found():
    """All three READMEs were read, and those that show commands have their blocks here."""
    assert len(BLOCKS) == sum(text.count("```console\n") for text in READMES.values())
    assert README.count("```console\n") >= 4


def test_the_length_of_the_course_readme():
    """It is read before anything else."""
    assert len(README.splitlines()) <= 250


@pytest.mark.parametrize("folder", [".", "playground"])
def test_parity_table(folder):
    """One loss for each dtype, whatever the lesson and the number of processes; test_parity.py runs all of it."""
    rows = [(row[0], row[3:]) for row in re.findall(PARITY, READMES[folder], re.M)]
    assert len(rows) >= 3
    assert len({(*numbers[:3], numbers[4]) for _, numbers in rows}) == 1
    assert all(float(numbers[3]) < 1e-4 and float(numbers[5]) < 1e-12 for _, numbers in rows)


def test_the_whole_parity_table():
    """It has every training lesson but ResNet-18's; both READMEs show the same numbers for the same run."""
    whole = {row[:3]: row[3:] for row in re.findall(PARITY, LESSONS_README, re.M)}
    exempt = {lesson for lesson in LESSONS if talks(lesson)} | {"compare", "distributed_data_parallel_resnet"}
    assert {lesson for lesson, *_ in whole} == set(LESSONS) - exempt
    for lesson in ("manual_data_parallel", "distributed_data_parallel", "distributed_data_parallel_torchrun"):
        assert len([row for row in whole if row[0] == lesson]) >= 4, lesson
    for row in re.findall(PARITY, README, re.M):
        assert whole[row[:3]] == row[3:]


@pytest.mark.parametrize("double", [False, True])
def test_the_parity_numbers_are_those_of_a_run(double):
    """The tables' numbers come from the last epoch of single_gpu.py with the flags that both READMEs give."""
    flags = "--dataset digits --batch_size 120 --epochs 2"
    assert f"`{flags}`" in README and f"`{flags}`" in LESSONS_README
    command = f"python playground/single_gpu.py {flags}" + " --double" * double
    out, _ = start(command, None).communicate(timeout=300)
    row = next(row for row in re.findall(PARITY, README, re.M) if row[0] == "single_gpu")
    loss, train, test, loss64 = map(float, (*row[3:6], row[7]))
    last = epochs(out)[-1]
    assert last["loss"] == pytest.approx(loss64 if double else loss, abs=1e-3)
    if not double:
        assert last["train"] == pytest.approx(train, abs=0.1)
        assert last["test"] == pytest.approx(test, abs=0.4)


def test_every_lesson_has_a_command():
    """Each lesson has one in the lessons' table."""
    assert sorted(COMMANDS) == LESSONS


@pytest.mark.parametrize("lesson", COMMANDS)
def test_the_command_of_a_lesson_runs(lesson, tmp_path):
    """The commands of the lessons' table, on the digits."""
    short = "" if talks(lesson) else " --epochs 1" if "resnet" in lesson else " --dataset digits --epochs 1"
    short += f" --run_dir {tmp_path}" if "resumable" in lesson else ""
    short += f" --out {tmp_path}" if lesson in ("profile_steps", "compare") else ""
    short += " --only parity --lessons single_gpu" if lesson == "compare" else ""
    process = start(COMMANDS[lesson] + short, None)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out


def test_the_figures_are_there():
    """Each figure that playground/README.md shows, and no others; each says in words what is on it."""
    shown = re.findall(r"^!\[(.{20,})\]\((figures/\w+\.png)\)$", LESSONS_README, re.M)
    there = {f"figures/{path.name}" for path in (ROOT / "playground" / "figures").iterdir()}
    assert {path for _, path in shown} == there
    assert all((ROOT / "playground" / path).read_bytes().startswith(b"\x89PNG") for _, path in shown)


def test_the_faults_are_counted():
    """Each fault has a test, each test of test_faults.py is in the table, and the sentence above it has the sums."""
    rows = re.findall(r"^\| .* \| (\*\*survived\*\*|ends: ).* \| `(test_\w+)` \|$", TESTS_README, re.M)
    text = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    for _, name in rows:
        assert f"def {name}(" in text, name
    there = set(re.findall(r"^def (test_\w+)", (ROOT / "tests" / "test_faults.py").read_text(), re.M))
    assert there <= {name for _, name in rows}
    sums = re.search(r"(\d+) faults tried, .*: (\d+) are survived, .*; (\d+) end", TESTS_README)
    survived = [outcome for outcome, _ in rows].count("**survived**")
    assert tuple(map(int, sums.groups())) == (len(rows), survived, len(rows) - survived)


def test_each_test_file_is_explained():
    """tests/README.md names each file of tests."""
    for path in (ROOT / "tests").glob("test_*.py"):
        assert f"`{path.name}`" in TESTS_README, path.name


def anchors(path):
    """Return the anchors that GitHub makes of a file's headings."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("folder", FOLDERS)
def test_links_and_names_lead_somewhere(folder):
    """Each file and each section that a README links to is there, and each script that it names."""
    path = ROOT / folder / "README.md"
    text = path.read_text()
    prose = re.sub(r"`[^`\n]*`|\n", " ", text)
    links = [link for link in re.findall(r"\]\(([^)]+)\)", prose) if not link.startswith("https://")]
    assert links or folder == "run"
    for link in links:
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link
    for name in re.findall(r"(?:playground|run|common|tests)/\w+\.(?:py|sh|sbatch)\b", text):
        assert (ROOT / name).exists() or name == "playground/broken.py", name


def test_each_script_is_explained():
    """Each script in run/ is named in a README, but for those that only other scripts use."""
    text = "".join(READMES.values()) + LAUNCHERS.read_text()
    for path in (ROOT / "run").iterdir():
        inner = not os.access(path, os.X_OK) and path.suffix == ".sh"  # only read by others
        assert path.name in text or path.name == "setup.sh" or inner, path.name


def test_troubles():
    """At least 25 rows, and each exercise that one points at is there."""
    troubles = README.partition("## Troubleshooting")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| ", troubles, re.M)) - 1 >= 25
    for number, lesson in re.findall(r"break-it (\d) of `(\w+)\.py`", README):
        exercises = (ROOT / "playground" / f"{lesson}.py").read_text().partition("Break it, in a copy")[2]
        assert f"\n  {number}. " in exercises or re.search(rf"\({number}\)\s", exercises)


@pytest.mark.parametrize("host", ["docs.pytorch.org", "github.com", "pytorch.org", "docs.nvidia.com"])
def test_links_of_others_are_whole(host):
    """What leads out of the checkout is https, without spaces or a trailing dot. Whether it is there is not tried."""
    found = [link for text in READMES.values() for link in re.findall(rf"https://{re.escape(host)}[^\s)>]*", text)]
    assert found
    assert not any(link.endswith(".") for link in found)
