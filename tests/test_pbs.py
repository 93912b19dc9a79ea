"""run/pbs.sh on two nodes, with what PBS gives to a job: a node file and two variables.

Debian does not have PBS.
"""

import os
import re
import signal
import sys

from launch import LONG, SHORT, Job, epochs, one_process
from lessons import ROOT
from nodes import LIGHT, PATIENT, check_places, read_until

SCRIPT = ROOT / "run" / "pbs.sh"
LESSON = "playground/distributed_data_parallel.py"


def start(sshd, lesson, ranks):
    """Start the job on node 0, with so many ranks on each node."""
    file = sshd.folder / "nodes"
    file.write_text("node0\n" * ranks + "node1\n" * ranks)
    env = {"PBS_NODEFILE": str(file), "PBS_O_WORKDIR": str(ROOT), "PBS_JOBID": "7.node0"}
    env |= {"LESSON": lesson, "SSH": sshd.command, "PYTHON": sys.executable}
    return Job(*sshd.nodes.enter(0), "bash", SCRIPT, env=env, cwd="/")


def test_a_job_for_each_kind_of_lesson(sshd):
    """A lesson that starts its ranks, one on each node, prints the numbers of single_gpu.py.

    When one of them is killed, the job ends, and no process stays. torchrun starts two ranks on
    each node, and qdel, which sends SIGTERM, ends them.
    """
    job = start(sshd, " ".join(map(str, [LESSON, *SHORT[:-1], LONG[-1], *PATIENT])), 1)
    text = re.sub("^node[01]: ", "", read_until(job, "^node0: epoch 1/.*\n"), flags=re.M)
    table = re.findall(r"^\d +(\d) +\d +cpu +(\d+) +(\S+)$", text, re.M)
    assert [(rank, host) for rank, _, host in table] == [("0", "node0"), ("1", "node1")], text
    assert epochs(text) == one_process(*SHORT)
    os.kill(int(table[1][1]), signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 1
    assert "terminated with signal SIGKILL" in done.stdout
    assert "--port 12007 " in done.stderr
    assert sshd.left() == []
    flags = ("--device", "cpu", "--sleep")
    job = start(sshd, " ".join([LIGHT, *flags]), 2)
    check_places(read_until(job, r"^node\d: rank \d waits$", 4), *flags)
    job.process.terminate()
    assert job.wait().returncode == 143
    assert sshd.left() == []
