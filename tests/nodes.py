"""Two nodes on one machine: network namespaces with addresses, host names and an interface of their own."""

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DEBIAN = {  # a program that a test needs, and the package that has it
    "ip": "iproute2",
    "tc": "iproute2",
    "mount": "mount",
    "ping": "iputils-ping",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "munged": "munge",
    "qsub": "slurm-wlm-torque",
    "generate_pbs_nodefile": "slurm-wlm-torque",
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
}
HOSTS = ["node0", "node1"]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]

# Variables of the caller that a launcher takes to other nodes, one that it does not, and a script that prints them.
TRAVEL = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_NAME": "a b'$c", "OMP_NUM_THREADS": "1"}
STAYS = {"CUDA_VISIBLE_DEVICES": "0"}
VARIABLES = f"""import os
os.environ.get("RANK")  # as a lesson for launchers has it
there = {{name: os.environ[name] for name in {[*TRAVEL, *STAYS]} if name in os.environ}}
print(f"{{os.uname().nodename}}: {{there}}", flush=True)
"""
PATIENT = ("--timeout", 300)  # for lessons: however busy the machine is, all ranks come
LIGHT = "tests/light.py"  # a lesson for launchers that costs nothing, and what its ranks say on two nodes with two each
PLACES = [
    f"rank {rank} of 4, on its node {rank % 2} of 2, node {node}, {host}"
    for node, host in enumerate(HOSTS)
    for rank in (2 * node, 2 * node + 1)
]
os.environ["PATH"] += ":/usr/sbin:/sbin"  # where Debian has ip and the daemons


def need(*programs: str) -> None:
    """Skip the test unless it runs as root and the programs are here; the reason has the command that installs them."""
    if missing := sorted({DEBIAN[name] for name in programs if not shutil.which(name)}):
        pytest.skip(f"missing: sudo apt-get install --no-install-recommends {' '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("not root: sudo -E run/test.sh")


def sh(*command) -> str:
    """Run a command to its end and return its output; fails with what it wrote to stderr."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Put a file system of this size, as in 4m, on a folder, as long as the context lasts."""
    need("mount")
    sh("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    try:
        yield
    finally:
        sh("umount", folder)


def read_until(job, pattern: str, count: int = 1) -> str:
    """Read what a Job prints until so many places match, and return it. The job is killed if they never come."""
    text, guard = "", threading.Timer(600, job.kill)
    guard.start()
    try:
        for line in job.process.stdout:
            text += line
            if len(re.findall(pattern, text, re.M)) >= count:
                return text
    finally:
        guard.cancel()
    raise AssertionError(text + job.process.stderr.read())


class Nodes:
    """node0 (10.77.0.1) and node1 (10.77.0.2), joined by a cable: eth0 in each. Use as a context manager."""

    def __init__(self):
        self.names = [f"playground-{os.getpid()}-{index}" for index in range(2)]

    def __enter__(self):
        need("ip")
        try:
            for name in self.names:
                sh("ip", "netns", "add", name)
                hosts = "".join(f"{address} {host}\n" for address, host in zip(ADDRESSES, HOSTS, strict=True))
                folder = Path("/etc/netns") / name  # ip netns exec shows what is here in place of /etc
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
            ends = "eth0", "netns", self.names[0], "type", "veth", "peer", "name", "eth0", "netns", self.names[1]
            sh("ip", "link", "add", *ends)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                sh("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                sh("ip", "-n", name, "link", "set", "lo", "up")
                sh("ip", "-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            for pid in self.pids(self.names.index(name)):
                subprocess.run(["kill", "-9", str(pid)], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def enter(self, index: int) -> list[str]:
        """Return the words before a command that make it run on a node."""
        with_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', HOSTS[index]]
        return ["ip", "netns", "exec", self.names[index], *with_name]

    def pids(self, index: int) -> list[int]:
        """Return the processes that run on a node."""
        done = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def left(self, own=(), seconds: float = 90) -> list[str]:
        """Return the command lines of processes on both nodes that don't end in that time; `own` are none of them."""
        end = time.monotonic() + seconds
        while (pids := {*self.pids(0), *self.pids(1)} - set(own)) and time.monotonic() < end:
            time.sleep(0.1)
        ps = ["ps", "-o", "args=", "-p", ",".join(map(str, pids))]
        return subprocess.run(ps, capture_output=True, text=True).stdout.splitlines() if pids else []

    def link(self, state: str) -> None:
        """Pull the cable out ("down") or put it back ("up")."""
        sh("ip", "-n", self.names[0], "link", "set", "eth0", state)

    def bandwidth(self, rate: str) -> None:
        """Limit what each node sends, as in "100mbit"."""
        for name in self.names:
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            sh("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)
