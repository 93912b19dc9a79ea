"""A Slurm cluster of the two nodes, with its controller on node 0 and a slurmd on each node."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from lessons import ROOT
from nodes import ADDRESSES, HOSTS, need, until

SETTINGS = """\
ClusterName=playground
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
FirstJobId={first}
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
MessageTimeout=100
TCPTimeout=60
BatchStartTimeout=300
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=INFINITE State=UP
"""
# Two tasks of two cores fit on each node, however many CPUs the machine has.
NODE = "NodeName={host} NodeAddr={address} CPUs=4 RealMemory=4000"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


class Slurm:
    """A running cluster. Use it as a context manager, inside the one of Nodes.

    It writes only to `folder`, whose path must not contain spaces.
    """

    def __init__(self, nodes, folder):
        self.nodes = nodes
        self.folder = Path(folder)
        self.daemons = []

    def __enter__(self):
        need("munged", "slurmctld", "slurmd")
        (self.folder / "state").mkdir()
        lines = []
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            (self.folder / f"spool-{host}").mkdir()
            lines.append(NODE.format(host=host, address=address))
        text = SETTINGS.format(
            folder=self.folder, host=HOSTS[0], first=os.getpid(), nodes="\n".join(lines)
        )
        settings, key = self.folder / "slurm.conf", self.folder / "munge.key"
        settings.write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        flags = ["--foreground", "--force", f"--socket={self.folder}/munge.socket"]
        for name in ("key", "pid", "log", "seed"):
            flags.append(f"--{name}-file={self.folder}/munge.{name}")
        try:
            self.start("munged", 0, *flags)
            until((self.folder / "munge.socket").exists, self.ends_of_logs)
            self.start("slurmctld", 0, "-D", "-f", settings)
            for index, host in enumerate(HOSTS):
                self.start("slurmd", index, "-D", "-N", host, "-f", settings)
            until(self.is_idle, self.ends_of_logs)
        except BaseException:
            self.__exit__()
            raise
        self.own = [*self.nodes.pids(0), *self.nodes.pids(1)]
        return self

    def start(self, program, index, *flags):
        """Start a daemon on a node. Its output goes to a log file with its name."""
        command = [*self.nodes.enter(index), shutil.which(program), *flags]
        with (self.folder / f"{program}-{index}.log").open("w") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.daemons.append(daemon)

    def ends_of_logs(self):
        """Return what the daemons have said last."""
        return "\n".join([log.read_text()[-2000:] for log in self.folder.glob("*.log")])

    def is_idle(self):
        """Whether both nodes are up and run no job."""
        # A state that ends with * belongs to a node that does not answer.
        done = self.command("sinfo", "--partition=all", "--Node", "--noheader", "--format=%T")
        return done.stdout.split() == ["idle"] * len(HOSTS)

    def __exit__(self, *_):
        for daemon in self.daemons:
            daemon.kill()  # Nodes ends what slurmd has started
            daemon.wait()

    def command(self, *words, **env):
        """Run one of Slurm's commands on node 0, in the checkout, with variables in addition."""
        words = [*self.nodes.enter(0), *(str(word) for word in words)]
        found = {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        env = os.environ | found | env
        return subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)

    def submit(self, *words, **env):
        """Submit a job, which inherits the environment. Returns its id and its output's path."""
        done = self.command("sbatch", "--output", self.folder / "%j.out", *words, **env)
        assert done.returncode == 0, done.stderr
        job = int(done.stdout.split()[-1])
        return job, self.folder / f"{job}.out"

    def show(self, job):
        """Return what Slurm knows about a job, such as its JobState."""
        done = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.split("=", 1) for pair in done.stdout.split() if "=" in pair)

    def wait(self, job):
        """Wait until a job has ended and the nodes are idle. Returns what `show` returns."""
        until(lambda: self.show(job).get("JobState") in ENDED, self.ends_of_logs)
        until(self.is_idle, self.ends_of_logs)
        return self.show(job)

    def left(self):
        """Return the command lines of processes that stay on the nodes and are no daemons."""
        return self.nodes.left(self.own)  # it waits, because slurmstepd ends after its ranks


def wait_for(output, pattern, count=1):
    """Wait until a job's output file matches so many times. Returns its text."""
    until(output.exists, lambda: f"there is no {output}")
    until(lambda: len(re.findall(pattern, output.read_text(), re.M)) >= count, output.read_text)
    return output.read_text()
