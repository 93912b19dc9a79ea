"""A Slurm cluster of the two nodes, with its controller on node 0 and a slurmd on each node."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from nodes import ADDRESSES, HOSTS, need

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
KillWait=5
MessageTimeout=100
TCPTimeout=60
BatchStartTimeout=300
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
# Two tasks fit on each node, however many CPUs the machine has.
NODE = "NodeName={host} NodeAddr={address} CPUs=2 RealMemory=4000"
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
        text = SETTINGS.format(folder=self.folder, host=HOSTS[0], nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        settings = self.folder / "slurm.conf"
        try:
            flags = ["--foreground", "--force", f"--socket={self.folder}/munge.socket"]
            for name in ("key", "pid", "log", "seed"):
                flags.append(f"--{name}-file={self.folder}/munge.{name}")
            self.start("munged", 0, *flags)
            self.wait_for_munge()
            self.start("slurmctld", 0, "-D", "-f", settings)
            for index, host in enumerate(HOSTS):
                self.start("slurmd", index, "-D", "-N", host, "-f", settings)
            self.wait_until_idle()
            self.own = [*self.nodes.pids(0), *self.nodes.pids(1)]
        except BaseException:
            self.__exit__()
            raise
        return self

    def start(self, program, index, *flags):
        """Start a daemon on a node. Its output goes to a log file with its name."""
        command = [*self.nodes.enter(index), shutil.which(program), *flags]
        with (self.folder / f"{program}-{index}.log").open("w") as log:
            daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.daemons.append(daemon)

    def wait_for_munge(self, seconds=300):
        """Wait until munged listens, because the other daemons authenticate each other with it."""
        end = time.monotonic() + seconds
        while not (self.folder / "munge.socket").exists():
            assert time.monotonic() < end, (self.folder / "munged-0.log").read_text()
            time.sleep(0.05)

    def wait_until_idle(self, seconds=300):
        """Wait until both nodes are up and run no job."""
        end = time.monotonic() + seconds
        states = []
        while states != ["idle"] * len(HOSTS):
            ends_of_logs = [log.read_text()[-2000:] for log in self.folder.glob("*.log")]
            assert time.monotonic() < end, "\n".join(ends_of_logs)
            time.sleep(0.2)
            # A state that ends with * belongs to a node that does not answer.
            done = self.command("sinfo", "--Node", "--noheader", "--format=%T")
            states = done.stdout.split()

    def __exit__(self, *_):
        for daemon in self.daemons:
            daemon.kill()  # Nodes ends what slurmd has started
            daemon.wait()

    @property
    def environment(self):
        """Return the environment in which Slurm's commands find this cluster."""
        settings = str(self.folder / "slurm.conf")
        return os.environ | {"SLURM_CONF": settings, "OMP_NUM_THREADS": "1"}

    def command(self, *words, cwd=None, env=None):
        """Run one of Slurm's commands on node 0 to its end. `env` is added to its environment."""
        words = [*self.nodes.enter(0), *(str(word) for word in words)]
        options = {"capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(words, env=self.environment | (env or {}), cwd=cwd, **options)

    def submit(self, *words, cwd, env=None, by="sbatch"):
        """Submit a job by sbatch or by qsub. It inherits the environment. Returns its id."""
        done = self.command(by, *words, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    def show(self, job):
        """Return what Slurm knows about a job, such as JobState, ExitCode and StdOut."""
        done = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.split("=", 1) for pair in done.stdout.split() if "=" in pair)

    def wait(self, job, seconds=600):
        """Wait until a job has ended and the nodes are idle. Returns what `show` returns."""
        end = time.monotonic() + seconds
        shown = self.show(job)
        while shown.get("JobState") not in ENDED:
            assert time.monotonic() < end, shown
            time.sleep(0.3)
            shown = self.show(job)
        self.wait_until_idle()
        return shown

    def left(self):
        """Return the command lines of processes that stay on the nodes and are no daemons."""
        return self.nodes.left(self.own)  # it waits, because slurmstepd ends after its ranks


def wait_for(output, pattern, count=1, seconds=600):
    """Wait until a job's output file matches so many times. Returns its text."""
    end = time.monotonic() + seconds
    while True:
        text = output.read_text() if output.exists() else ""
        if len(re.findall(pattern, text, re.M)) >= count:
            return text
        assert time.monotonic() < end, f"{output}: {text}"
        time.sleep(0.1)
