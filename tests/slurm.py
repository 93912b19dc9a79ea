"""A Slurm cluster of the two nodes: its controller on node 0, one slurmd on each."""

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
NODE = "NodeName={host} NodeAddr={address} CPUs=2 RealMemory=4000"  # two tasks on each, whatever the machine has
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}


class Slurm:
    """Use as a context manager, inside the one of Nodes. Everything it writes is in `folder`, a path without spaces."""

    def __init__(self, nodes, folder):
        self.nodes = nodes
        self.folder = Path(folder)
        self.daemons = []

    def __enter__(self):
        need("munged", "slurmctld", "slurmd")
        for name in ["state", *(f"spool-{host}" for host in HOSTS)]:  # slurmd makes only the last folder of its path
            (self.folder / name).mkdir()
        lines = [NODE.format(host=host, address=address) for host, address in zip(HOSTS, ADDRESSES, strict=True)]
        text = SETTINGS.format(folder=self.folder, host=HOSTS[0], nodes="\n".join(lines))
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        settings = self.folder / "slurm.conf"
        try:
            files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
            self.start("munged", 0, "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
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
        """Start a daemon on a node. What it says is in a file of its name."""
        command = [*self.nodes.enter(index), shutil.which(program), *flags]
        with (self.folder / f"{program}-{index}.log").open("w") as log:
            self.daemons.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def wait_for_munge(self, seconds=300):
        """Wait until munged listens: without it the others can't trust each other."""
        end = time.monotonic() + seconds
        while not (self.folder / "munge.socket").exists():
            assert time.monotonic() < end, (self.folder / "munged-0.log").read_text()
            time.sleep(0.05)

    def wait_until_idle(self, seconds=300):
        """Wait until both nodes are there and have nothing to do."""
        end = time.monotonic() + seconds
        states = []
        while states != ["idle"] * len(HOSTS):
            assert time.monotonic() < end, "\n".join(log.read_text()[-2000:] for log in self.folder.glob("*.log"))
            time.sleep(0.2)
            done = self.command("sinfo", "--Node", "--noheader", "--format=%T")  # a * after it: does not answer
            states = done.stdout.split()

    def __exit__(self, *_):
        for daemon in self.daemons:
            daemon.kill()  # what slurmd has started is ended with the nodes
            daemon.wait()

    @property
    def environment(self):
        """Return the environment in which Slurm's commands find this cluster."""
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def command(self, *words, cwd=None, env=None):
        """Run one of Slurm's commands on node 0 to its end. `env` is added to its environment."""
        words = [*self.nodes.enter(0), *(str(word) for word in words)]
        options = {"capture_output": True, "text": True, "timeout": 300}
        return subprocess.run(words, env=self.environment | (env or {}), cwd=cwd, **options)

    def submit(self, *words, cwd, env=None, by="sbatch"):
        """Submit a job that inherits the environment, by sbatch or by qsub. Returns its id."""
        done = self.command(by, *words, cwd=cwd, env=env)
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[-1])

    def show(self, job):
        """Return what Slurm knows about a job: JobState, ExitCode, StdOut and so on."""
        done = self.command("scontrol", "--oneliner", "show", "job", job)
        return dict(pair.split("=", 1) for pair in done.stdout.split() if "=" in pair)

    def wait(self, job, seconds=600):
        """Wait for a job's end and until the nodes are free again. Returns what Slurm says about it."""
        end = time.monotonic() + seconds
        while (shown := self.show(job)).get("JobState") not in ENDED:
            assert time.monotonic() < end, shown
            time.sleep(0.3)
        self.wait_until_idle()
        return shown

    def left(self):
        """Return the command lines of processes on the nodes that no daemon is and that don't end soon."""
        return self.nodes.left(self.own)  # slurmstepd tidies up after its ranks


def wait_for(output, pattern, count=1, seconds=600):
    """Wait until a job's output matches so many times. Returns it."""
    end = time.monotonic() + seconds
    while not output.exists() or len(re.findall(pattern, output.read_text(), re.M)) < count:
        assert time.monotonic() < end, output.read_text() if output.exists() else output
        time.sleep(0.1)
    return output.read_text()
