"""run/check_node.sh: what it says about two nodes that are fit, and about each thing that is not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from nodes import ADDRESSES, HOSTS, sh
from sshd import Sshd

INTERFACES = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
VERSIONS = "Python 3.11.0, torch 2.15.0, GPUs: "


def check(nodes, index, *others, **settings):
    """Run the script on a node, from another folder. Returns its status, and its lines without "ok"."""
    settings = {"NODE0": HOSTS[0], "PYTHON": sys.executable} | dict.fromkeys(INTERFACES, "") | settings
    command = [*nodes.enter(index), ROOT / "run" / "check_node.sh", *others]
    options = {"capture_output": True, "text": True, "timeout": 60, "cwd": "/"}
    done = subprocess.run(command, env=os.environ | settings, **options)
    assert done.stderr == ""
    found = done.stdout.splitlines()
    assert all(line.startswith(("ok    ", "FIX   ")) for line in found)
    return done.returncode, [line.removeprefix("ok    ") for line in found]


@pytest.fixture
def fake(tmp_path):
    """Return a function that writes a program into a folder; `fake.path` finds these first."""

    def write(name, script):
        path = tmp_path / "fakes" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    write.path = f"{tmp_path / 'fakes'}:{os.environ['PATH']}"
    return write


@pytest.fixture
def python(fake):
    """A Python that knows the versions at once: importing torch takes seconds."""
    return fake("python", f"echo {VERSIONS}0")


def test_nodes_that_are_fit(nodes, tmp_path):
    """Everything is ok on both nodes, as node 1 sees node 0 and the other way round."""
    with Sshd(nodes, tmp_path) as sshd:
        status, lines = check(nodes, 0, HOSTS[1], SSH=sshd.command)
        assert status == 0, lines
        assert lines[0] == "this is node 0, and its port 8888 is free"
        assert lines[1:3] == [f"{name} isn't needed: eth0 is the only network" for name in INTERFACES]
        assert lines[3].startswith("Python 3.") and ", torch " in lines[3]
        assert lines[4:] == ["node1 has the same time", "node1 has the same"]
        status, lines = check(nodes, 1, HOSTS[0], SSH=sshd.command, PORT="22")
        assert status == 0, lines
        assert lines[0] == "node0 listens on port 22"


def test_the_way_to_node_0(nodes, python):
    """A port that is taken, an address that nobody has, a name that leads nowhere or to each machine itself."""
    status, lines = check(nodes, 1, PYTHON=python)
    assert (status, lines[0]) == (0, "node0 can be reached; on port 8888 nothing listens yet")
    code = "import socket; server = socket.create_server(('', 8888)); print('up', flush=True); server.accept()"
    server = subprocess.Popen([*nodes.enter(0), sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == "up\n"
        status, lines = check(nodes, 0, PYTHON=python)
        assert (status, lines[0].split(":")[0]) == (1, "FIX   port 8888 is taken")
    finally:
        server.kill()
        server.communicate()
    for address, fault, advice in [
        ("10.77.0.9", "no answer from port 8888 of 10.77.0.9 (10.77.0.9) in 3 s", "correct NODE0, or let TCP through"),
        ("node7", "the name node7 leads nowhere", "correct NODE0, or add the name to /etc/hosts"),
        ("localhost", "localhost leads to 127.0.0.1, each machine's own", "set NODE0 to the address that the other"),
    ]:
        status, lines = check(nodes, 1, NODE0=address, PYTHON=python)
        assert (status, lines[0].startswith(f"FIX   {fault}: {advice}")) == (1, True), lines


def test_a_host_name_that_leads_to_loopback(nodes, python):
    """Debian's /etc/hosts has 127.0.1.1: gloo would listen there. The advice is enough."""
    hosts = Path("/etc/netns") / nodes.names[1] / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 node1\n{ADDRESSES[0]} node0\n")
    status, lines = check(nodes, 1, PYTHON=python)
    fault = "FIX   this host's name, node1, leads to 127.0.1.1: export GLOO_SOCKET_IFNAME=eth0, or correct /etc/hosts"
    assert (status, lines[1]) == (1, fault)
    status, lines = check(nodes, 1, PYTHON=python, GLOO_SOCKET_IFNAME="eth0")
    assert (status, lines[1]) == (0, "GLOO_SOCKET_IFNAME is eth0, which leads to node0")


def test_several_networks(nodes, python):
    """It names the interface that leads to node 0, and is content when the variables name it."""
    sh("ip", "-n", nodes.names[1], "link", "add", "docker0", "type", "veth", "peer", "name", "other")
    sh("ip", "-n", nodes.names[1], "address", "add", "172.17.0.1/16", "dev", "docker0")
    sh("ip", "-n", nodes.names[1], "link", "set", "docker0", "up")
    status, lines = check(nodes, 1, PYTHON=python)
    also = "FIX   eth0 leads to node0, but there is docker0 as well: export "
    assert (status, lines[1:3]) == (1, [f"{also}{name}=eth0" for name in INTERFACES])
    status, lines = check(nodes, 1, PYTHON=python, GLOO_SOCKET_IFNAME="docker0", NCCL_SOCKET_IFNAME="eth0")
    wrong = "FIX   GLOO_SOCKET_IFNAME is docker0, but eth0 leads to node0: export GLOO_SOCKET_IFNAME=eth0"
    assert (status, lines[1]) == (1, wrong)
    status, lines = check(nodes, 1, PYTHON=python, **dict.fromkeys(INTERFACES, "eth0"))
    assert (status, lines[1:3]) == (0, [f"{name} is eth0, which leads to node0" for name in INTERFACES])


def test_hosts_that_differ(nodes, tmp_path, fake, python):
    """Another torch, another clock, no torch at all, no way in: a line each."""
    with Sshd(nodes, tmp_path) as sshd:
        options = {"SSH": sshd.command, "PATH": fake.path}
        older = "Python 3.11.0, torch 2.9.0, GPUs: 0"
        two = fake("two", f"[ $(hostname) = node1 ] && echo {older} || echo {VERSIONS}0")
        fake("date", "expr $(/bin/date +%s) + 3600")
        status, lines = check(nodes, 0, HOSTS[1], "node7", PYTHON=two, **options)
        assert status == 1
        assert re.match(r"FIX   the clock of node1 differs by about 3[56]\d\d s: set both by NTP: ", lines[-3])
        assert lines[-2].startswith(f"FIX   node1 has {older}, not {VERSIONS}0: install the same there")
        assert lines[-1].startswith("FIX   can't log in to node7 (ssh: Could not resolve hostname node7: ")
        assert lines[-1].endswith(f"): try it alone: {sshd.command} node7")
        fake("date", 'exec /bin/date "$@"')
        missing = fake("missing", f"[ $(hostname) = node1 ] && exit 1; echo {VERSIONS}0")
        status, lines = check(nodes, 0, HOSTS[1], PYTHON=missing, **options)
        setup = f"{sshd.command} node1 {ROOT}/run/setup.sh"
        assert (status, lines[-2]) == (1, "node1 has the same time")
        assert lines[-1] == f"FIX   node1 can't run {missing} with torch in {ROOT}: {setup}"


OLD_DRIVER = """\
import types
__version__ = "2.15.0"
cuda = types.SimpleNamespace(device_count=lambda: 2)
def zeros(size, device):
    if device == 1:
        raise RuntimeError("The driver is too old.\\nUpdate it.")
"""


def test_gpus(nodes, fake, python, tmp_path):
    """As many as nvidia-smi lists, without their parts, must be seen by torch, and work; else it says what to do."""
    path = {"PATH": fake.path}
    fake("nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not communicate with the GPU driver.'; exit 9")
    none = f"{VERSIONS}0: the lessons run on the CPU, with gloo"
    assert check(nodes, 0, PYTHON=python, **path)[1][-1] == none
    lost = "Unable to determine the device handle for GPU0000:3F:00.0: Unknown Error"
    fake("nvidia-smi", f"echo GPU 0; echo '  MIG 1g.18gb Device 0'; echo '{lost}'; echo GPU 1")
    assert check(nodes, 0, PYTHON=fake("two", f"echo {VERSIONS}2"), **path)[1][-1] == f"{VERSIONS}2"
    status, lines = check(nodes, 0, PYTHON=fake("one", f"echo {VERSIONS}1"), **path)
    fault = "FIX   nvidia-smi lists 2 GPUs, torch finds 1: unset CUDA_VISIBLE_DEVICES, end MIG, update the driver"
    assert (status, lines[-1]) == (1, fault)
    (tmp_path / "torch.py").write_text(OLD_DRIVER)
    status, lines = check(nodes, 0, PYTHONPATH=str(tmp_path), **path)
    assert status == 1
    broken = "torch 2.15.0, GPUs: 2, but GPU 1 does not work (The driver is too old.): update its driver, or install "
    assert lines[-1].startswith("FIX   Python 3.") and broken in lines[-1], lines
    status, lines = check(nodes, 0, PYTHON="/no/python", **path)
    assert (status, lines[-1]) == (1, "FIX   /no/python can't import torch: run/setup.sh")
