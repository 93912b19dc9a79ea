"""run/check_node.sh: what it prints about two nodes that are ready, and about each fault."""

import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, Job
from nodes import HOSTS, sh
from sshd import Sshd

INTERFACES = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"]
VERSIONS = "Python 3.11.0, torch 2.15.0, GPUs: "


def check(nodes, index, *others, **settings):
    """Run the script on a node, from another folder. Returns its status and lines without "ok"."""
    defaults = {"NODE0": HOSTS[0], "PYTHON": sys.executable} | dict.fromkeys(INTERFACES, "")
    settings = defaults | settings
    command = [*nodes.enter(index), ROOT / "run" / "check_node.sh", *others]
    options = {"capture_output": True, "text": True, "timeout": 60, "cwd": "/"}
    done = subprocess.run(command, env=os.environ | settings, **options)
    assert done.stderr == ""
    found = done.stdout.splitlines()
    assert all(line.startswith(("ok    ", "FIX   ")) for line in found)
    return done.returncode, [line.removeprefix("ok    ") for line in found]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Return a function that writes a program, which is found first."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def write(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def python(fake):
    """A program in place of Python that prints the versions at once, without importing torch."""
    return fake("python", f"echo {VERSIONS}0")


def test_nodes_that_are_fit(nodes, tmp_path):
    """Everything is ok, and each line says so."""
    with Sshd(nodes, tmp_path) as sshd:
        status, lines = check(nodes, 0, HOSTS[1], SSH=sshd.command)
        assert status == 0, lines
        assert lines[0] == "this is node 0, and its port 8888 is free"
        unneeded = "is not needed, because eth0 is the only network"
        assert lines[1:3] == [f"{name} {unneeded}" for name in INTERFACES]
        assert lines[3].startswith("Python 3.") and ", torch " in lines[3]
        assert lines[4:] == ["node1 has the same time", "node1 has the same versions and GPUs"]


def test_how_node_0_is_reached(nodes, python):
    """Four faults: a port in use, a wrong address, a name without an address, and localhost."""
    status, lines = check(nodes, 1, PYTHON=python)
    assert (status, lines[0]) == (0, "node0 can be reached, and nothing listens on port 8888 yet")
    code = "import socket; server = socket.create_server(('', 8888));"
    code += " print('up', flush=True); server.accept()"
    server = Job(*nodes.enter(0), sys.executable, "-c", code)
    assert server.process.stdout.readline() == "up\n"
    status, lines = check(nodes, 0, PYTHON=python)
    server.kill()
    assert (status, lines[0].split(":")[0]) == (1, "FIX   port 8888 is in use")
    silent = "no answer from port 8888 of 10.77.0.9 (10.77.0.9) in 3 s"
    loopback = "with 127.0.0.1, the address of localhost, every machine reaches itself"
    for address, fault, advice in (
        ("10.77.0.9", silent, "correct NODE0, or allow TCP in the firewalls"),
        ("node7", "the name node7 has no address", "correct NODE0, or add the name to /etc/hosts"),
        ("localhost", loopback, "set NODE0 to the address at which the other nodes reach node 0"),
    ):
        status, lines = check(nodes, 1, NODE0=address, PYTHON=python)
        assert (status, lines[0]) == (1, f"FIX   {fault}: {advice}")


def test_which_interface(nodes, python):
    """It names the interface that leads to node 0. If the variables name this one, all is ok."""
    ip = ("ip", "-n", nodes.names[1])
    sh(*ip, "link", "add", "docker0", "type", "veth", "peer", "name", "other")
    sh(*ip, "address", "add", "172.17.0.1/16", "dev", "docker0")
    sh(*ip, "link", "set", "docker0", "up")
    status, lines = check(nodes, 1, PYTHON=python)
    fault = "FIX   eth0 leads to node0, but there are other networks (docker0)"
    assert (status, lines[1:3]) == (1, [f"{fault}: export {name}=eth0" for name in INTERFACES])
    status, lines = check(nodes, 1, PYTHON=python, GLOO_SOCKET_IFNAME="docker0")
    fault = "FIX   GLOO_SOCKET_IFNAME is docker0, but eth0 leads to node0"
    assert (status, lines[1]) == (1, f"{fault}: export GLOO_SOCKET_IFNAME=eth0")
    status, lines = check(nodes, 1, PYTHON=python, **dict.fromkeys(INTERFACES, "eth0"))
    right = [f"{name} is eth0, which leads to node0" for name in INTERFACES]
    assert (status, lines[1:3]) == (0, right)


def test_hosts_that_differ(nodes, tmp_path, fake):
    """There is a line for each: a different torch, a different clock, no login."""
    older = "Python 3.11.0, torch 2.9.0, GPUs: 0"
    two = fake("two", f"[ $(hostname) = node1 ] && echo {older} || echo {VERSIONS}0")
    fake("date", "expr $(/bin/date +%s) + 3600")
    with Sshd(nodes, tmp_path) as sshd:
        status, lines = check(nodes, 0, HOSTS[1], "node7", PYTHON=two, SSH=sshd.command)
    assert status == 1
    clocks = r"FIX   the clock of node1 differs by about 3[56]\d\d s: set both clocks by NTP: "
    assert re.match(clocks, lines[-3])
    versions = f"FIX   node1 has {older}, this machine has {VERSIONS}0: install the same on both"
    assert lines[-2].startswith(versions)
    login = "FIX   cannot log in to node7 (ssh: Could not resolve hostname node7: "
    assert lines[-1].startswith(login)
    assert lines[-1].endswith(f"): try this alone: {sshd.command} node7")


def test_gpus(nodes, fake, python):
    """torch must find as many GPUs as nvidia-smi lists; parts of a GPU do not count."""

    def last(python):
        status, lines = check(nodes, 0, PYTHON=python)
        assert status == lines[-1].startswith("FIX   ")
        return lines[-1]

    fake("nvidia-smi", "echo 'NVIDIA-SMI has failed because it could not communicate'; exit 9")
    assert last(python) == f"{VERSIONS}0: the lessons run on the CPU, with gloo"
    fake("nvidia-smi", "echo GPU 0; echo '  MIG 1g.18gb Device 0'; echo GPU 1")
    assert last(fake("two", f"echo {VERSIONS}2")) == f"{VERSIONS}2"
    advice = "unset CUDA_VISIBLE_DEVICES, switch off MIG, or update the driver"
    fault = "FIX   nvidia-smi lists 2 GPUs, but torch finds 1"
    assert last(fake("one", f"echo {VERSIONS}1")) == f"{fault}: {advice}"
    assert last("/no/python") == "FIX   /no/python cannot import torch: run/setup.sh"
