"""The commands of run/README.md: console blocks are run as they are, its launchers on two nodes."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SHORT, Job, epochs, lesson_path, one_process
from nodes import ADDRESSES, HOSTS, PATIENT, Nodes, need
from slurm import Slurm
from sshd import Sshd
from test_nodes import on_both
from test_pbs import JOB, SCRIPT
from test_readme import COMMANDS, masked
from test_run_scripts import kind

TEXT = (ROOT / "run" / "README.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```$", TEXT, re.M | re.S)
LAUNCHERS = TEXT[TEXT.index("## Which launcher when") : TEXT.index("### Which lesson")]
ROWS = re.findall(r"^    (\S.*)$", re.sub(r" *\\\n +", " ", LAUNCHERS), re.M)
PROGRAMS = {
    "sbatch": ("slurmctld",),
    "qsub": ("qsub", "generate_pbs_nodefile"),
    "run/mpirun.sh": ("mpirun.openmpi",),
}
PYTHON = f"""#!/bin/sh
[ "$1" != -c ] || exec {sys.executable} "$@"
echo "on $(hostname): $*"
"""


def start(command, prefix=(), **env):
    """Start a command line as somebody would who has activated the environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return Job(*prefix, "bash", "-c", command, env={"PATH": path} | env, cwd=ROOT)


@pytest.mark.parametrize("block", BLOCKS)
def test_console_block(block):
    """Each command prints what is shown, line by line; after "..." there may be more."""
    if "rehearse" in block:
        need("ip")
    block = block.replace(" \\\n    ", " ")
    for command, shown in re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", block, re.M):
        done = start(command).wait(600)
        lines = []
        for line in (done.stdout + done.stderr).splitlines():
            if not re.match(r"(node\d: )?\+ ", line):  # a script shows what it runs
                lines.append(line)
        shown, more, _ = shown.partition("...\n")
        if more:
            assert set(shown.splitlines()) <= set(lines), lines
        else:
            assert [*map(masked, lines)] == [*map(masked, shown.splitlines())], done.stderr
        ran, shown = [
            epochs(re.sub("^node[01]: ", "", text, flags=re.M)) for text in (done.stdout, shown)
        ]
        for got, expected in zip(ran, shown, strict=True):
            assert got["loss"] == pytest.approx(expected["loss"], abs=2e-3)
            assert got["test"] == pytest.approx(expected["test"], abs=0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two nodes with ssh servers, and a Python that prints what it is to run."""
    folder = tmp_path_factory.mktemp("cluster")
    for name in ("slurm", "sshd"):
        (folder / name).mkdir()
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    with Nodes() as nodes, Sshd(nodes, folder / "sshd") as sshd:
        yield nodes, sshd, folder


@pytest.fixture(scope="module")
def slurm(cluster):
    """Slurm on the two nodes, and a job that does for run/pbs.sh what PBS does."""
    nodes, _, folder = cluster
    directives = "\n".join(
        line for line in SCRIPT.read_text().splitlines() if line.startswith("#PBS")
    )
    (folder / "job.sh").write_text(JOB.format(directives=directives, folder=folder, script=SCRIPT))
    with Slurm(nodes, folder / "slurm") as slurm:
        yield slurm


@pytest.mark.parametrize("command", [row for row in ROWS if "run/" in row])
def test_a_command_starts_its_lesson_on_both_nodes(command, cluster, request):
    """Each script comes as far as starting Python with the lesson on each node."""
    for script, programs in PROGRAMS.items():
        if script in command:
            need(*programs)
    nodes, sshd, folder = cluster
    env = {"SSH": sshd.command, "PYTHON": str(folder / "python")}
    lesson = re.search(r"playground/\w+\.py", command)[0]
    command = command.replace("10.0.0.1", ADDRESSES[0]).replace("10.0.0.2", ADDRESSES[1])
    if "sbatch" in command or "qsub" in command:
        slurm, output = request.getfixturevalue("slurm"), folder / "output"
        output.unlink(missing_ok=True)
        command = command.replace("sbatch run", f"sbatch --output {output} run")
        command = command.replace("-V run/pbs.sh", f"-V -j oe -o {output} {folder}/job.sh")
        done = start(command, nodes.enter(0), **env, SLURM_CONF=f"{folder}/slurm/slurm.conf").wait()
        assert done.returncode == 0, done.stderr
        assert slurm.wait(int(done.stdout.split()[-1]))["JobState"] == "COMPLETED", (
            output.read_text()
        )
        printed = output.read_text()
    else:
        where = [()] if "rehearse" in command else [nodes.enter(0)]
        where += [nodes.enter(1)] if "run/torchrun_node.sh" in command else []  # typed on each node
        done = [job.wait() for job in [start(command, prefix, **env) for prefix in where]]
        assert [one.returncode for one in done] == [0] * len(where), done
        printed = "".join(one.stdout for one in done)
    for host in HOSTS:
        assert re.search(rf"on {host}: .*{lesson}", printed), printed


def test_the_flags_for_two_terminals(cluster, tmp_path):
    """The first command, typed on both nodes: two ranks on each print what one process prints.

    That only node 0 saves is no difference.
    """
    python, path, *flags = shlex.split(ROWS[0].replace("10.0.0.1", ADDRESSES[0]))
    assert (python, flags[4:6]) == ("python", ["-nr", "0"])
    words = (ROOT / path, *flags, *SHORT, *PATIENT)
    done, _ = on_both(cluster[0], (*words, "-s", tmp_path / "c.pt"), (*words, "-nr", 1))
    assert (tmp_path / "c.pt").exists()
    hosts = [row.split()[-1] for row in done.stdout.splitlines()[1:5]]
    assert hosts == ["node0", "node0", "node1", "node1"]
    assert epochs(done.stdout) == one_process(*SHORT)


def test_torchrun_on_one_node():
    """The command without a script of run/, and torchrun with restarts.

    They are the first commands in the lessons' docstrings, all of which test_readme.py runs.
    """
    alone = [row for row in ROWS if row.startswith("torchrun ")]
    text = re.sub(r" *\\\n +", " ", TEXT)
    restarts = re.findall(r"^    (TORCH_\w+=1 torchrun .*)$", text, re.M)
    assert alone == COMMANDS["distributed_data_parallel_torchrun"]
    assert restarts == COMMANDS["distributed_data_parallel_resumable"]


def test_which_lesson_with_which_launcher():
    """The table says of each kind of lesson what the scripts say."""
    rows = re.findall(r"^\| (`\w+\.py`.*) \| (yes|no) \| (yes|no) \|$", TEXT, re.M)
    assert len(rows) == 4
    for names, itself, launcher in rows:
        kinds = ["itself"] * (itself == "yes") + ["launcher"] * (launcher == "yes")
        for lesson in re.findall(r"`(\w+)\.py`", names):
            assert kind(lesson_path(lesson)) == kinds, lesson
