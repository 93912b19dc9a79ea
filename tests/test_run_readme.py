"""The commands of run/README.md: console blocks are run as they are, its launchers on two nodes."""

import os
import re
import sys
from pathlib import Path

import pytest
from launch import Job, epochs
from lessons import ROOT
from nodes import ADDRESSES, HOSTS, need
from test_readme import COMMANDS, agree, masked

TEXT = (ROOT / "run" / "README.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```$", TEXT, re.M | re.S)
LAUNCHERS = TEXT[TEXT.index("## Slurm") : TEXT.index("## Which lesson")]
ROWS = re.findall(r"^    (\S.*)$", re.sub(r" *\\\n +", " ", LAUNCHERS), re.M)
SCRIPTS = [row for row in ROWS if ".sh " in row and "qsub" not in row and "one_gpu" not in row]
PYTHON = f"""#!/bin/sh
[ "$1" != -c ] || exec {sys.executable} "$@"
echo "on $(hostname): $*"
"""


def start(command, prefix=(), **env):
    """Start a command line as in a shell in which the environment is activated."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHON": sys.executable} | env
    return Job(*prefix, "bash", "-c", command, env=env, cwd=ROOT)


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
            # A script shows what it runs. torchrun may say that node 0 has ended first.
            if not re.match(r"(node\d: )?\+ |node1: W.* failed to shutdown the rendezvous", line):
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
            agree(got, expected)


@pytest.fixture(scope="module")
def cluster(sshd):
    """Two nodes with ssh servers, and a Python that prints what it is to run."""
    python = sshd.folder / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return sshd.nodes, {"SSH": sshd.command, "PYTHON": str(python)}


@pytest.mark.parametrize("command", SCRIPTS)
def test_a_command_starts_its_lesson_on_both_nodes(command, cluster):
    """Each script comes as far as starting Python with the lesson on each node.

    Those of a scheduler are in test_slurm.py and test_pbs.py, one_gpu.sh in test_run_scripts.py.
    """
    if "run/mpirun.sh" in command:
        need("mpirun.openmpi")
    nodes, env = cluster
    lesson = re.search(r"playground/[\w/]+\.py", command)[0]
    command = command.replace("10.0.0.1", ADDRESSES[0]).replace("10.0.0.2", ADDRESSES[1])
    where = [()] if "rehearse" in command else [nodes.enter(0)]
    where += [nodes.enter(1)] if "run/torchrun_node.sh" in command else []  # typed on each node
    done = [job.wait() for job in [start(command, prefix, **env) for prefix in where]]
    assert [one.returncode for one in done] == [0] * len(where), done
    printed = "".join(one.stdout for one in done)
    for host in HOSTS:
        assert re.search(rf"on {host}: .*{lesson}", printed), printed


def test_torchrun_on_one_node():
    """The command without a script of run/, and torchrun with restarts.

    They are the first commands in the lessons' docstrings, all of which test_readme.py runs.
    """
    alone = [row for row in ROWS if row.startswith("torchrun ")]
    text = re.sub(r" *\\\n +", " ", TEXT)
    restarts = re.findall(r"^    (TORCH_\w+=1 torchrun .*)$", text, re.M)
    assert alone == COMMANDS["distributed_data_parallel_torchrun"]
    assert restarts == COMMANDS["resumable"]
