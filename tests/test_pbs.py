"""run/pbs.sh, submitted by qsub.

This is Slurm's torque front, not PBS, which Debian does not have: qsub, qdel and the #PBS lines are meant to be the
same, and generate_pbs_nodefile writes the node file. What PBS sets by itself, the test's job sets: PBS_NODEFILE,
PBS_O_WORKDIR and PBS_JOBID.
"""

import os
import re
import signal
import time

import pytest
from conftest import ROOT, SHORT, Job, epochs, one_process
from nodes import HOSTS, Nodes, need
from slurm import Slurm
from sshd import Sshd

SCRIPT = ROOT / "run" / "pbs.sh"
LESSON = "playground/distributed_data_parallel.py"
LONG = (*SHORT[:-1], "100000")
JOB = """\
#!/usr/bin/env bash
{directives}
export PBS_NODEFILE=$(generate_pbs_nodefile) PBS_O_WORKDIR=$SLURM_SUBMIT_DIR PBS_JOBID=$SLURM_JOB_ID.node0
mv "$PBS_NODEFILE" {folder}/nodefile
PBS_NODEFILE={folder}/nodefile exec bash "{script}" "$@"
"""


@pytest.fixture(scope="module")
def pbs(tmp_path_factory):
    """A cluster whose nodes reach each other by ssh, and a job that does what PBS does before it runs the script."""
    need("qsub")
    folder = tmp_path_factory.mktemp("pbs")
    for name in ("slurm", "sshd"):
        (folder / name).mkdir()
    directives = "\n".join(line for line in SCRIPT.read_text().splitlines() if line.startswith("#PBS"))
    assert "nodes=2:ppn=2" in directives
    (folder / "job.sh").write_text(JOB.format(directives=directives, folder=folder, script=SCRIPT))
    with Nodes() as nodes, Sshd(nodes, folder / "sshd") as sshd, Slurm(nodes, folder / "slurm") as slurm:
        yield slurm, sshd, folder


def submit(pbs, *command, cwd=ROOT, **env):
    """Submit the job with all of qsub's environment. Returns its id and where its output will be."""
    slurm, sshd, folder = pbs
    output = folder / "output"
    output.unlink(missing_ok=True)
    words = ("-V", "-j", "oe", "-o", output, folder / "job.sh", *command)
    return slurm.submit(*words, cwd=cwd, env={"SSH": sshd.command} | env, by="qsub"), output


@pytest.mark.parametrize("lesson", [LESSON, "playground/distributed_data_parallel_torchrun.py"])
def test_two_nodes(lesson, pbs):
    """LESSON with its flags, on the nodes of the node file: single_gpu.py's numbers, and no process stays.

    For one that spawns its ranks, and for one that torchrun starts.
    """
    job, output = submit(pbs, LESSON=" ".join(map(str, [lesson, *SHORT])))
    shown = pbs[0].wait(job)
    text = re.sub("^node[01]: ", "", output.read_text(), flags=re.M)
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), text
    table = re.findall(r"^\d+ +(\d) +(\d) +cpu +\d+ +(\S+)$", text, re.M)
    assert sorted(row[2] for row in table) == sorted(HOSTS * 2), text
    assert epochs(text) == one_process(*SHORT)
    assert pbs[0].left() == []


@pytest.mark.parametrize("how", ["rank", "qdel"])
def test_the_end_of_one_is_the_end_of_all(how, pbs):
    """A killed rank ends the job as FAILED, qdel as CANCELLED; nothing is left on either node."""
    job, output = submit(pbs, LESSON, *LONG)  # this qsub passes arguments, others don't
    end = time.monotonic() + 180
    while not (output.exists() and re.search("^node0: epoch ", output.read_text(), re.M)):
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.1)
    if how == "rank":
        os.kill(int(re.findall(r"(\d+) +node1$", output.read_text(), re.M)[-1]), signal.SIGKILL)
    else:
        assert pbs[0].command("qdel", job).returncode == 0
    state = {"rank": "FAILED", "qdel": "CANCELLED"}[how]
    assert pbs[0].wait(job)["JobState"] == state, output.read_text()
    assert pbs[0].left() == []


def test_what_is_missing_is_one_line(tmp_path):
    """Not in a job, not in the checkout, no lesson, a flag in its place, nodes with different numbers of processes."""
    even, uneven = tmp_path / "even", tmp_path / "uneven"
    even.write_text("node0\nnode0\nnode1\nnode1\n")
    uneven.write_text("node0\nnode0\nnode1\n")
    inside = {"PBS_NODEFILE": str(even), "PBS_O_WORKDIR": str(ROOT)}
    for status, command, env, words in (
        (1, (LESSON,), {}, ("not inside a PBS job", "qsub -v LESSON=")),
        (1, (LESSON,), inside | {"PBS_O_WORKDIR": str(tmp_path)}, (str(tmp_path), "cd <checkout>")),
        (1, (LESSON,), inside | {"PBS_NODEFILE": str(uneven)}, ("different numbers", "nodes=2:ppn=2")),
        (2, (), inside, ("no lesson", "qsub -v LESSON=")),
        (2, (), inside | {"LESSON": "--epochs 1"}, ("--epochs", "playground/*.py")),
    ):
        done = Job(SCRIPT, *command, env=env).wait()
        lines = done.stderr.splitlines()
        assert (done.returncode, len(lines)) == (status, 1), done.stderr
        for word in ("error: ", *words):
            assert word in lines[0], lines[0]
