"""run/pbs.sh, submitted by the qsub that comes with Slurm.

Debian does not have PBS. Slurm's qsub and qdel imitate PBS's, and they read the lines with #PBS.
generate_pbs_nodefile writes the node file. The test's job sets the three variables that PBS would
set: PBS_NODEFILE, PBS_O_WORKDIR and PBS_JOBID.
"""

import os
import re
import signal

import pytest
from conftest import LONG, ROOT, SHORT, Job, epochs, one_process
from nodes import LIGHT, PATIENT, PLACES, Nodes, need, pids_of_two
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


def submit(pbs, *command, flags=(), cwd=ROOT, **env):
    """Submit the job with the environment of qsub. Returns its id and its output file."""
    slurm, sshd, folder = pbs
    output = folder / "output"
    output.unlink(missing_ok=True)
    words = (*flags, "-V", "-j", "oe", "-o", output, folder / "job.sh", *command)
    job = slurm.submit(*words, cwd=cwd, env={"SSH": sshd.command} | env, by="qsub")
    return job, output


def test_training_until_a_rank_is_killed(pbs):
    """A lesson that starts its ranks, one on each node, prints the numbers of single_gpu.py.

    When a rank is killed, the job is FAILED and no process stays.
    """
    lesson = " ".join(map(str, [LESSON, *SHORT[:-1], LONG[-1], *PATIENT]))
    job, output = submit(pbs, flags=("-l", "nodes=2:ppn=1"), LESSON=lesson)
    text = re.sub("^node[01]: ", "", wait_for(output, "^node0: epoch 1/.*\n"), flags=re.M)
    pids = pids_of_two(text)
    assert epochs(text)[:1] == one_process(*SHORT)
    os.kill(pids[1], signal.SIGKILL)
    assert pbs[0].wait(job)["JobState"] == "FAILED", output.read_text()
    assert pbs[0].left() == []


def test_two_nodes(pbs):
    """torchrun starts LESSON with its flags on the nodes of the node file, two ranks on each."""
    job, output = submit(pbs, LESSON=f"{LIGHT} --flag 7")
    shown = pbs[0].wait(job)
    text = output.read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), text
    flags = ", flags ['--flag', '7']"
    ranks = sorted(re.findall(r"^node\d: (rank .*)", text, re.M))
    assert ranks == [place + flags for place in PLACES], text
    assert pbs[0].left() == []


def test_qdel(pbs):
    """qdel ends the ranks on both nodes."""
    job, output = submit(pbs, LIGHT, "--wait")  # Slurm's qsub passes arguments, PBS's does not
    wait_for(output, r"^node\d: rank \d waits$", 4)
    assert pbs[0].command("qdel", job).returncode == 0
    assert pbs[0].wait(job)["JobState"] == "CANCELLED", output.read_text()
    assert pbs[0].left() == []


def test_what_is_missing_is_one_line(tmp_path):
    """Each of five mistakes ends in one line, which has what to do."""
    even = tmp_path / "even"
    uneven = tmp_path / "uneven"
    even.write_text("node0\nnode0\nnode1\nnode1\n")
    uneven.write_text("node0\nnode0\nnode1\n")
    inside = {"PBS_NODEFILE": str(even), "PBS_O_WORKDIR": str(ROOT)}
    for status, command, env, words in (
        (1, (LESSON,), {}, ("not inside a PBS job", "qsub -V run/pbs.sh")),
        (1, (LESSON,), inside | {"PBS_O_WORKDIR": str(tmp_path)}, (str(tmp_path), "cd <checkout>")),
        (
            1,
            (LESSON,),
            inside | {"PBS_NODEFILE": str(uneven)},
            ("different numbers", "nodes=2:ppn=2"),
        ),
        (2, (), inside, ("no lesson", "qsub -V run/pbs.sh")),
        (2, (), inside | {"LESSON": "--epochs 1"}, ("--epochs", "playground/*.py")),
    ):
        done = Job(SCRIPT, *command, env=env).wait()
        lines = done.stderr.splitlines()
        assert (done.returncode, len(lines)) == (status, 1), done.stderr
        for word in ("error: ", *words):
            assert word in lines[0], lines[0]
