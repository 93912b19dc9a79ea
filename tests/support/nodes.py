"""Two nodes on one machine.

Each is a network namespace with an address, a host name and an interface (eth0) of its own.
"""

import contextlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
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
    "mpirun.openmpi": "openmpi-bin",
    "mpiexec.hydra": "mpich",
}
HOSTS = ["node0", "node1"]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
FILE_OF_HOSTS = "127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n"

# Variables of the caller that a launcher passes to other nodes, and one that it does not pass.
TRAVEL = {
    "NCCL_DEBUG": "INFO",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "1",
    "TORCH_NAME": "a b'$c",
}
STAYS = {"CUDA_VISIBLE_DEVICES": "0"}
PATIENT = ("--timeout", 300)  # for lessons, because ranks start late on a busy machine
LIGHT = "tests/programs/light.py"  # a lesson for launchers that does not import PyTorch
FLAGS = ("--device", "cpu", "--sleep", "a folder/c.pt")  # for it
os.environ["PATH"] += ":/usr/sbin:/sbin"  # where Debian has ip and the daemons


def need(*programs: str) -> None:
    """Skip the test unless it runs as root and the programs are installed.

    The reason for the skip has the command that installs them.
    """
    missing = sorted({DEBIAN[name] for name in programs if not shutil.which(name)})
    if missing:
        pytest.skip(f"missing: sudo apt-get install --no-install-recommends {' '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("not root: sudo -E run/test.sh --all")


def sh(*command) -> str:
    """Run a command to its end and return its output. If it fails, raise with its stderr."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of this size, such as 4m, on a folder while the context lasts."""
    need("mount")
    sh("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    try:
        yield
    finally:
        sh("umount", folder)


def check_places(text: str, *flags: str) -> None:
    """Check what the light lesson prints, with these flags and two ranks on each of two nodes."""
    expected = []
    for rank in range(4):
        node, local = divmod(rank, 2)
        place = f"rank {rank} of 4, on its node {local} of 2, node {node}, {HOSTS[node]}"
        expected.append(f"{place}, flags {[*flags]}")
    assert sorted(re.findall(r"rank \d of .*", text)) == expected, text


def variables(text: str) -> dict[str, str]:
    """Return which variables the light lesson has seen on each node."""
    return dict(re.findall(r"(node\d): (\{.*\})$", text, re.M))


def read_until(job, pattern: str, count: int = 1) -> str:
    """Read what a Job prints until so many places match, and return it.

    The job is killed if they do not appear within ten minutes.
    """
    text = ""
    guard = threading.Timer(600, job.kill)
    guard.start()
    try:
        for line in job.process.stdout:
            text += line
            if len(re.findall(pattern, text, re.M)) >= count:
                return text
    finally:
        guard.cancel()
    raise AssertionError(text + job.process.stderr.read())


def until(condition, told=lambda: None, seconds: float = 600) -> None:
    """Wait until a function returns true. If that takes too long, fail with what told() returns."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, told()
        time.sleep(0.1)


class Nodes:
    """node0 (10.77.0.1) and node1 (10.77.0.2), connected by a virtual cable from eth0 to eth0.

    Use it as a context manager.
    """

    def __init__(self):
        self.names = [f"playground-{os.getpid()}-{index}" for index in range(2)]

    def __enter__(self):
        need("ip")
        try:
            for name in self.names:
                sh("ip", "netns", "add", name)
                # `ip netns exec` mounts the files of this folder over those of /etc.
                folder = Path("/etc/netns") / name
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(FILE_OF_HOSTS)
            end0 = ("eth0", "netns", self.names[0])
            end1 = ("eth0", "netns", self.names[1])
            sh("ip", "link", "add", *end0, "type", "veth", "peer", "name", *end1)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                sh("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                sh("ip", "-n", name, "link", "set", "lo", "up")
                sh("ip", "-n", name, "link", "set", "eth0", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for index, name in enumerate(self.names):
            for pid in self.pids(index):
                subprocess.run(["kill", "-9", str(pid)], stderr=subprocess.DEVNULL)
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def enter(self, index: int) -> list[str]:
        """Return the words that, in front of a command, make it run on a node."""
        with_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', HOSTS[index]]
        return ["ip", "netns", "exec", self.names[index], *with_name]

    def pids(self, index: int) -> list[int]:
        """Return the processes that run on a node."""
        words = ["ip", "netns", "pids", self.names[index]]
        done = subprocess.run(words, capture_output=True, text=True)
        return [int(pid) for pid in done.stdout.split()]

    def ranks(self) -> list[int]:
        """Return the pids of the light lesson's ranks on both nodes, in their order."""
        found = {}
        for pid in [*self.pids(0), *self.pids(1)]:
            with contextlib.suppress(psutil.Error):  # it has just ended
                process = psutil.Process(pid)
                rank = process.environ().get("RANK")
                if rank and LIGHT in process.cmdline():
                    found[int(rank)] = pid
        return [found[rank] for rank in sorted(found)]

    def left(self, own=(), seconds: float = 90) -> list[str]:
        """Return the command lines of processes that still run on the nodes after that time.

        The pids in `own` do not count.
        """
        end = time.monotonic() + seconds
        while (pids := {*self.pids(0), *self.pids(1)} - set(own)) and time.monotonic() < end:
            time.sleep(0.1)
        return [" ".join(psutil.Process(pid).cmdline()) for pid in pids]

    def link(self, state: str) -> None:
        """Disconnect the cable ("down") or connect it again ("up")."""
        sh("ip", "-n", self.names[0], "link", "set", "eth0", state)

    def bandwidth(self, rate: str) -> None:
        """Limit how fast each node sends, for example to "100mbit"."""
        for name in self.names:
            limit = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            sh("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root", *limit)
