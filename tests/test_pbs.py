"""run/pbs.sh, submitted by the qsub that comes with Slurm.

Debian does not have PBS. Slurm's qsub and qdel imitate PBS's, and they read the lines with #PBS.
generate_pbs_nodefile writes the node file. The test's job sets the three variables that PBS would
set: PBS_NODEFILE, PBS_O_WORKDIR and PBS_JOBID.
"""

import os
import re
import signal

import pytest
from conftest import LONG, ROOT, SHORT, Job, epochs, one_line, one_process
from nodes import LIGHT, PATIENT, PLACES, Nodes, need
from slurm import Slurm, wait_for
from sshd import Sshd

SCRIPT = ROOT / "run" / "pbs.sh"
LESSON = "playground/distributed_data_parallel.py"
JOB = """\
#!/usr/bin/env bash
{directives}
export PBS_NODEFILE=$(generate_pbs_nodefile) PBS_O_WORKDIR=$SLURM_SUBMIT_DIR
export PBS_JOBID=$SLURM_JOB_ID.node0
mv "$PBS_NODEFILE" {folder}/nodefile
PBS_NODEFILE={folder}/nodefile exec bash "{script}" "$@"
"""


@pytest.fixture(scope="module")
def pbs(tmp_path_factory):
    """A cluster whose nodes reach each other by ssh, and a job that runs the script as PBS does."""
    need("qsub")
    folder = tmp_path_factory.mktemp("pbs")
    for name in ("slurm", "sshd"):
        (folder / name).mkdir()
    lines = SCRIPT.read_text().splitlines()
    directives = "\n".join([line for line in lines if line.startswith("#PBS")])
    assert "nodes=2:ppn=2" in directives
    (folder / "job.sh").write_text(JOB.format(directives=directives, folder=folder, script=SCRIPT))
    with (
        Nodes() as nodes,
        Sshd(nodes, folder / "sshd") as sshd,
        Slurm(nodes, folder / "slurm") as slurm,
    ):
        yield slurm, sshd, folder


def submit(pbs, *command, flags=(), **env):
    """Submit the job with the environment of qsub. Returns its id and its output file."""
    slurm, sshd, folder = pbs
    output = folder / "output"
    output.unlink(missing_ok=True)
    words = (*flags, "-V", "-j", "oe", "-o", output, folder / "job.sh", *command)
    job = slurm.submit(*words, cwd=ROOT, env={"SSH": sshd.command} | env, by="qsub")
    return job, output


def test_training_until_a_rank_is_killed(pbs):
    """A lesson that starts its ranks, one on each node, prints the numbers of single_gpu.py.

    When a rank is killed, the job is FAILED and no process stays.
    """
    lesson = " ".join(map(str, [LESSON, *SHORT[:-1], LONG[-1], *PATIENT]))
    job, output = submit(pbs, flags=("-l", "nodes=2:ppn=1"), LESSON=lesson)
    text = re.sub("^node[01]: ", "", wait_for(output, "^node0: epoch 1/.*\n"), flags=re.M)
    table = re.findall(r"^\d +(\d) +\d +cpu +(\d+) +(\S+)$", text, re.M)
    assert [(rank, host) for rank, _, host in table] == [("0", "node0"), ("1", "node1")], text
    assert epochs(text)[:1] == one_process(*SHORT)
    os.kill(int(table[1][1]), signal.SIGKILL)
    assert pbs[0].wait(job)["JobState"] == "FAILED", output.read_text()
    assert "terminated with signal SIGKILL" in output.read_text()
    assert pbs[0].left() == []


def test_qdel(pbs):
    """torchrun starts two ranks on each node of the node file, and qdel ends all of them."""
    job, output = submit(pbs, LESSON=f"{LIGHT} --wait")
    text = wait_for(output, r"^node\d: rank \d waits$", 4)
    ranks = sorted(re.findall(r"^node\d: (rank .*), flags \['--wait'\]$", text, re.M))
    assert ranks == PLACES, text
    assert pbs[0].command("qdel", job).returncode == 0
    assert pbs[0].wait(job)["JobState"] == "CANCELLED", output.read_text()
    assert pbs[0].left() == []


def test_what_is_missing_is_one_line(tmp_path):
    """Each of five mistakes ends in one line, which has what to do."""
    even, uneven = tmp_path / "even", tmp_path / "uneven"
    even.write_text("node0\nnode0\nnode1\nnode1\n")
    uneven.write_text("node0\nnode0\nnode1\n")
    inside = {"PBS_NODEFILE": str(even), "PBS_O_WORKDIR": str(ROOT), "LESSON": LESSON}
    for status, env, words in (
        (1, {}, ("not inside a PBS job", "qsub -V run/pbs.sh")),
        (1, inside | {"PBS_O_WORKDIR": str(tmp_path)}, (str(tmp_path), "cd <checkout>")),
        (1, inside | {"PBS_NODEFILE": str(uneven)}, ("different numbers", "nodes=2:ppn=2")),
        (2, inside | {"LESSON": ""}, ("no lesson", "qsub -V run/pbs.sh")),
        (2, inside | {"LESSON": "--epochs 1"}, ("--epochs", "playground/*.py")),
    ):
        done = Job(SCRIPT, env=env).wait()
        assert done.returncode == status, done.stderr
        one_line(done, *words)
