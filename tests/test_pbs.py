"""run/pbs.sh, submitted by the qsub that comes with Slurm, as Debian does not have PBS.

It reads the lines with #PBS. A prolog sets the variables that PBS would set.
"""

import os
import re
import signal
import sys

from conftest import LONG, SHORT, epochs, one_process
from nodes import LIGHT, PATIENT, check_places, need
from slurm import Slurm, wait_for
from sshd import Sshd

LESSON = "playground/distributed_data_parallel.py"
PROLOG = """\
#!/bin/sh
echo export PBS_NODEFILE=$(TMPDIR={folder} generate_pbs_nodefile)
echo export PBS_O_WORKDIR=$SLURM_SUBMIT_DIR
echo export PBS_JOBID=$SLURM_JOB_ID.node0
"""


def test_a_job_for_each_kind_of_lesson(nodes, tmp_path):
    """A lesson that starts its ranks, one on each node, prints the numbers of single_gpu.py.

    When one of them is killed, the job fails, and no process stays. torchrun starts two ranks on
    each node, and qdel ends them.
    """
    need("qsub", "generate_pbs_nodefile")
    for name in ("sshd", "slurm"):
        (tmp_path / name).mkdir()
    prolog, output = tmp_path / "prolog", tmp_path / "output"
    prolog.write_text(PROLOG.format(folder=tmp_path))
    prolog.chmod(0o755)
    sshd = Sshd(nodes, tmp_path / "sshd")
    with sshd, Slurm(nodes, tmp_path / "slurm", f"TaskProlog={prolog}") as slurm:

        def submit(*flags, lesson):
            output.unlink(missing_ok=True)
            env = {"LESSON": lesson, "SSH": sshd.command, "PYTHON": sys.executable}
            done = slurm.command(
                "qsub", "-V", "-o", output, "-e", output, *flags, "run/pbs.sh", **env
            )
            assert done.returncode == 0, done.stdout + done.stderr
            return int(done.stdout.split(".")[0])

        flags = [LESSON, *SHORT[:-1], LONG[-1], *PATIENT]
        job = submit("-l", "nodes=2:ppn=1", lesson=" ".join(map(str, flags)))
        text = re.sub("^node[01]: ", "", wait_for(output, "^node0: epoch 1/.*\n"), flags=re.M)
        table = re.findall(r"^\d +(\d) +\d +cpu +(\d+) +(\S+)$", text, re.M)
        assert [(rank, host) for rank, _, host in table] == [("0", "node0"), ("1", "node1")], text
        assert epochs(text)[:1] == one_process(*SHORT)
        os.kill(int(table[1][1]), signal.SIGKILL)
        assert slurm.wait(job)["JobState"] == "FAILED", output.read_text()
        assert "terminated with signal SIGKILL" in output.read_text()
        assert slurm.left() == []

        job = submit(lesson=f"{LIGHT} --device cpu --sleep")
        text = wait_for(output, r"^node\d: rank \d waits$", 4)
        check_places(text, "--device", "cpu", "--sleep")
        assert slurm.command("qdel", job).returncode == 0
        assert slurm.wait(job)["JobState"] == "CANCELLED", output.read_text()
        assert slurm.left() == []
