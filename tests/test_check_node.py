"""run/check_node.sh: what it prints about two nodes that are ready, and about each fault."""

import os
import subprocess
import sys

import pytest
from launch import Job
from lessons import ROOT
from nodes import HOSTS
from sshd import Sshd

VERSIONS = "Python 3.11.0, torch 2.15.0, GPUs: 0"
OLDER = "Python 3.11.0, torch 2.9.0, GPUs: 0"


def check(nodes, index, *others, **settings):
    """Run the script on a node, from another folder. Returns its status and lines."""
    settings = {"NODE0": HOSTS[0], "PYTHON": sys.executable} | settings
    command = [*nodes.enter(index), ROOT / "run" / "check_node.sh", *others]
    options = {"capture_output": True, "text": True, "timeout": 300, "cwd": "/"}
    done = subprocess.run(command, env=os.environ | settings, **options)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


@pytest.fixture
def python(tmp_path):
    """A program in place of Python: node1 has an older torch than node0."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n[ $(hostname) = node1 ] && echo {OLDER} || echo {VERSIONS}\n")
    path.chmod(0o755)
    return str(path)


def test_nodes_that_are_fit_and_hosts_that_differ(nodes, tmp_path, python):
    """Everything is ok. Then there is a line for a different torch, for no Python, and no login."""
    (tmp_path / "sshd").mkdir()
    with Sshd(nodes, tmp_path / "sshd") as sshd:
        status, lines = check(nodes, 0, HOSTS[1], SSH=sshd.command)
        assert status == 0, lines
        assert lines[0] == "ok    this is node 0, and its port 29500 is free"
        assert lines[1].startswith("ok    Python 3.") and ", torch " in lines[1]
        assert lines[2:] == ["ok    node1 has the same"]
        status, lines = check(nodes, 0, HOSTS[1], "node7", PYTHON=python, SSH=sshd.command)
        none = check(nodes, 0, HOSTS[1], PYTHON="/no/python", SSH=sshd.command)[1]
    assert status == 1
    assert lines[1] == f"ok    {VERSIONS}"
    assert lines[2].startswith(f"FIX   node1 has {OLDER}: install the same on all nodes")
    setup = f"{sshd.command} node7 {ROOT}/run/setup.sh"
    assert lines[3].startswith(
        "FIX   node7 cannot run torch (ssh: Could not resolve hostname node7: "
    )
    assert lines[3].endswith(f"): try {setup}")
    assert none[1].startswith("FIX   ") and none[1].endswith(": run/setup.sh")
    assert none[2].startswith("FIX   node1 cannot run torch (")


def test_how_node_0_is_reached(nodes, python):
    """Four faults: a port in use, a wrong address, a name without an address, and localhost."""
    status, lines = check(nodes, 1, PYTHON=python)
    assert (status, lines[0]) == (0, "ok    eth0 leads to node0, and its port 29500 answers")
    code = "import socket; server = socket.create_server(('', 29500));"
    code += " print('up', flush=True); server.accept()"
    server = Job(*nodes.enter(0), sys.executable, "-c", code)
    assert server.process.stdout.readline() == "up\n"
    status, lines = check(nodes, 0, PYTHON=python)
    server.kill()
    assert (status, lines[0].split(":")[0]) == (1, "FIX   port 29500 is in use")
    for address, fault in (
        ("10.77.0.9", "no answer from port 29500 of 10.77.0.9 in 3 s: correct NODE0, or allow TCP"),
        ("node7", "no route leads to node7: correct NODE0, or add the name to /etc/hosts"),
        ("localhost", "with localhost, every machine reaches itself: set NODE0 to an address"),
    ):
        status, lines = check(nodes, 1, NODE0=address, PYTHON=python)
        assert status == 1
        assert lines[0].startswith(f"FIX   {fault}")
