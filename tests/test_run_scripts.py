"""The shell scripts in run/ that install, start the first lesson and run the tests."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch import Job, epochs, one_line, one_process
from lessons import LESSONS, ROOT, lesson_path
from nodes import until


@pytest.fixture
def checkout(tmp_path):
    """A copy of the checkout, without its environment and data."""
    ignore = shutil.ignore_patterns(".venv", ".git", "data", "__pycache__", "checkpoints")
    return shutil.copytree(ROOT, tmp_path / "a checkout", ignore=ignore)


def script(name, *flags, **env):
    """Run a script as a user does, from another folder."""
    command = ["bash", name, *flags]
    return subprocess.run(command, cwd="/", env=os.environ | env, capture_output=True, text=True)


def write_program(path, text):
    """Write a shell script that stands for a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def ready(checkout):
    """The checkout after the installation, with a Python that prints its words, or its GPUs."""
    write_program(checkout / ".venv" / "bin" / "python", '[ "$1" = -W ] && echo $GPUS || echo "$*"')
    for name in ("requirements.txt", "tests/requirements.txt"):
        copy = checkout / ".venv" / "installed" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(checkout / name, copy)
    return checkout


def test_what_cannot_be_installed_is_one_clear_line(checkout):
    """It has the reason: no Python, an old one, or a missing package. The next run tries again."""
    quickstart = checkout / "run" / "quickstart.sh"
    for python in ("/no/such/python", "/bin/false"):
        done = script(quickstart, PYTHON=python)
        assert done.returncode == 1
        one_line(done, "no Python 3.11 or newer was found", "PYTHON=")
    assert not (checkout / ".venv").exists()
    (checkout / "requirements.txt").write_text("./no-such-package\n")
    done = script(quickstart)
    assert (done.returncode, done.stdout) == (1, "")
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "no-such-package" in error
    assert not (checkout / ".venv" / "installed").exists()


PIP = """
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [ "$2" = pip ]; then shift 4 && echo "$*" >>pip.txt && echo "Downloading a-1-py3.whl (9 kB)"; fi
"""


def installed(checkout, *words, **env):
    """Run run/setup.sh. Returns the flags of each run of pip, for which PIP stands."""
    flags = checkout / "pip.txt"
    flags.write_text("")
    done = script(checkout / "run" / "setup.sh", *words, **env)
    found = flags.read_text().splitlines()
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.splitlines().count("    a 1 (9 kB)") == len(found)  # what pip downloads
    return found


def test_what_is_installed_when(checkout, tmp_path):
    """The lessons do without what only the tests need, and nothing is installed twice.

    TORCH_INDEX_URL is where torch and torchvision come from, and nothing else.
    """
    write_program(tmp_path / "a path" / "python", PIP)
    pip = {"PYTHON": str(tmp_path / "a path" / "python")}
    tests = "tests/requirements.txt"
    assert installed(checkout, **pip) == ["-r requirements.txt"]
    assert installed(checkout, tests, **pip) == [f"-r {tests}"]
    assert installed(checkout, tests, **pip) == []
    (checkout / "requirements.txt").write_text("torch\n")
    torch, rest = installed(checkout, tests, TORCH_INDEX_URL="https://an.index/cpu", **pip)
    assert torch.endswith("/torch.txt --index-url https://an.index/cpu")
    assert rest == "-r requirements.txt"


def test_quickstart_counts_the_gpus_that_torch_can_use(ready, tmp_path):
    """With fewer than two it uses the CPU. What nvidia-smi lists does not count.

    Nothing is installed a second time, and the lesson gets the flags.
    """
    write_program(tmp_path / "fakes" / "nvidia-smi", "for gpu in 0 1 2 3; do echo GPU $gpu; done")
    path = f"{tmp_path / 'fakes'}:{os.environ['PATH']}"
    for gpus, device in (("1", "--device cpu "), ("2", "")):
        done = script(ready / "run" / "quickstart.sh", "--epochs", "1", GPUS=gpus, PATH=path)
        command = f"playground/distributed_data_parallel.py -g 2 {device}--epochs 1\n"
        assert done.stdout == command, done.stderr
        _, first, _, *last = done.stderr.splitlines()
        assert f"{first}\n" == f"+ python {command}"
        assert "    source .venv/bin/activate" in last  # what to type next
    # The block in README.md, which test_readme.py runs.
    block = r"^\$ run/quickstart.sh\n(.*\n.*\n)"
    shown = re.search(block, (ROOT / "README.md").read_text(), re.M)[1]
    done = script(ready / "run" / "quickstart.sh", GPUS="0")
    assert done.stderr.replace(" \n", "\n").startswith(shown)


def test_quickstart_ends_as_its_lesson_does(ready):
    """With its status, and without a word of success; at SIGTERM, together."""
    python = ready / ".venv" / "bin" / "python"
    write_program(python, '[ "$1" = -W ] && echo 0 || exit 3')
    done = script(ready / "run" / "quickstart.sh")
    assert done.returncode == 3 and "These were two processes" not in done.stderr
    write_program(python, '[ "$1" = -W ] && echo 0 && exit; touch started; exec sleep 3600')
    job = Job("bash", ready / "run" / "quickstart.sh")
    until((ready / "started").exists)
    job.process.terminate()
    assert job.wait().returncode == -signal.SIGTERM


def test_ranks_that_share_a_gpu():
    """Each is a node of one rank. Here the GPU is the CPU. One process has the same loss."""
    flags = ("--dataset", "digits", "--batch_size", "120", "--epochs", "1", "--double")
    lesson = "playground/distributed_data_parallel.py"
    env = {"PYTHON": sys.executable, "DEVICE": "cpu"}
    done = script(ROOT / "run" / "one_gpu.sh", "2", lesson, *flags, **env)
    assert epochs(done.stdout) == one_process(*flags, apart=1e-12), done.stderr


def test_which_lessons_start_their_ranks():
    """The scripts that ask find those of the table in run/README.md that take a node's flags."""
    table = (ROOT / "run" / "README.md").read_text()
    told = set()
    for names in re.findall(r"^\| (`\w+\.py`[^|(]*) \| yes \|", table, re.M):
        told |= set(re.findall(r"`(\w+)\.py`", names))
    assert told
    for name in ("two_nodes_ssh.sh", "rehearse_two_nodes.sh"):
        asked = re.search(r"grep -q '(.*?)' ", (ROOT / "run" / name).read_text())[1]
        command = ["grep", "-El", asked, *map(lesson_path, LESSONS)]
        found = subprocess.run(command, capture_output=True, text=True).stdout.split()
        assert {Path(path).stem for path in found} == told


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("mpirun.sh", {}),
        ("one_gpu.sh", {}),
        ("two_nodes_ssh.sh", {}),
        ("torchrun_node.sh", {"NODE0": "localhost"}),
        ("torchrun_node.sh", {}),
        ("slurm_srun.sbatch", {"SLURM_JOB_ID": "1"}),
        ("slurm_srun.sbatch", {}),
        ("slurm_torchrun.sbatch", {"SLURM_JOB_ID": "1"}),
        ("slurm_torchrun.sbatch", {}),
        ("pbs.sh", {"PBS_NODEFILE": "nodes"}),
        ("pbs.sh", {}),
    ],
)
def test_without_a_lesson_or_a_job_one_line_has_what_to_type(name, env):
    """The scripts that start a lesson end at once."""
    done = script(ROOT / "run" / name, **env)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.search(r" is missing: |: this is not a (Slurm|PBS) job: ", line), line
    assert f"/{name}" in line.partition("is")[2], line


def test_the_scripts_are_executable():
    """In a fresh clone, the files that begin with #! can be run by name, and no others."""
    for path in [*(ROOT / "run").iterdir(), ROOT / ".ci" / "run"]:
        assert os.access(path, os.X_OK) == path.read_text().startswith("#!"), path
