"""run/two_nodes_ssh.sh with real ssh servers starts a lesson on every node, and stops them all.

test_pbs.py trains with it.
"""

import os
import pty
import re
import signal
import subprocess
import sys

import pytest
from launch import Job
from lessons import ROOT
from nodes import (
    ADDRESSES,
    FLAGS,
    HOSTS,
    LIGHT,
    STAYS,
    TRAVEL,
    check_places,
    read_until,
    sh,
    variables,
)

SCRIPT = ROOT / "run" / "two_nodes_ssh.sh"
STUBBORN = f"""\
import os, subprocess, sys, time
def launch(flags):
    there = {{name: os.environ[name] for name in {[*TRAVEL, *STAYS]} if name in os.environ}}
    print(f"{{os.environ['PWD']}} {{flags}}\\n{{os.uname().nodename}}: {{there}}", flush=True)
    if flags[flags.index("-nr") + 1] == FAILING:
        sys.exit(3)
    for stubborn in "", "trap '' INT TERM; ":  # two ranks, of which the second ignores signals
        subprocess.Popen(["sh", "-c", stubborn + "echo waiting; while :; do sleep 0.1; done"])
    time.sleep(3600)
if __name__ == "__main__":
    launch(sys.argv[1:])
"""


@pytest.fixture(autouse=True)
def nothing_is_left(sshd):
    """A test must leave no process on the nodes but the servers."""
    yield
    assert sshd.left() == []


def start(sshd, *words, **settings):
    """Start the script on node 0, from another folder, with settings for its EDIT block."""
    settings = {"SSH": sshd.command, "PYTHON": sys.executable} | settings
    return Job(*sshd.nodes.enter(0), SCRIPT, *words, env=settings, cwd="/")


def test_a_lesson_that_starts_its_ranks_until_it_is_ended(sshd, tmp_path):
    """Each node gets its flags, the user's unchanged, and the variables of NCCL, gloo and torch.

    After SIGTERM no process stays on any node, even if it ignores signals.
    """
    (tmp_path / "lesson.py").write_text(STUBBORN.replace("FAILING", "None"))
    checkout = tmp_path / "a checkout"
    checkout.symlink_to(ROOT)
    own = "it's in $HOME  &c.pt"
    settings = {"CHECKOUT": str(checkout), "GPUS": "3", "PORT": "8889"} | TRAVEL | STAYS
    job = start(sshd, tmp_path / "lesson.py", own, **settings)
    text = read_until(job, "waiting$", 4)
    for node, host in enumerate(HOSTS):
        flags = ["-n", "2", "-g", "3", "-nr", f"{node}", "-ip", "node0", "--port", "8889", own]
        assert f"{host}: {checkout} {flags}\n" in text
    assert variables(text) == dict.fromkeys(HOSTS, str(TRAVEL))
    job.process.terminate()
    done = job.wait()
    assert done.returncode == 143
    assert [line[:9] for line in done.stderr.splitlines()] == ["+ node0: ", "+ node1: "]


def test_ctrl_c(sshd):
    """Typed at a terminal, it ends torchrun and its ranks on both nodes."""
    terminal, end = pty.openpty()
    command = ["setsid", "--ctty", "--wait", *sshd.nodes.enter(0), SCRIPT, LIGHT, *FLAGS]
    env = os.environ | {"SSH": sshd.command, "PYTHON": sys.executable}
    script = subprocess.Popen(command, env=env, stdin=end, stdout=end, stderr=end)
    os.close(end)
    text = ""
    while text.count(" waits") < 4:
        text += os.read(terminal, 1024).decode()
    os.write(terminal, b"\x03")
    assert script.wait(60) == 130
    os.close(terminal)


def test_a_node_that_fails_ends_all(sshd, tmp_path):
    """The script ends with the status of node 1, and node 0 has no process, either."""
    (tmp_path / "lesson.py").write_text(STUBBORN.replace("FAILING", "'1'"))
    done = start(sshd, tmp_path / "lesson.py").wait()
    assert done.returncode == 3, done.stdout + done.stderr
    done = start(sshd, tmp_path / "lesson.py", HOSTS="node0 node7").wait()
    assert done.returncode == 255
    assert "node7: ssh: Could not resolve hostname node7: " in done.stdout


def test_a_lesson_for_torchrun_until_kill_9(sshd):
    """torchrun starts two ranks on each node, with the flags and the same variables.

    The command of hangs.md shows where each of them is. After kill -9 of a rank, and of the script,
    no process stays.
    """
    job = start(sshd, LIGHT, *FLAGS, **TRAVEL, **STAYS)
    text = read_until(job, r"^node\d: rank \d waits$", 4)
    check_places(text, *FLAGS)
    assert variables(text) == dict.fromkeys(HOSTS, str(TRAVEL))
    page = (ROOT / "playground/pages/hangs.md").read_text()
    command = re.search(r"^    (for host in .*)$", page, re.M)[1].replace(
        "ssh ", sshd.command + " "
    )
    command = command.replace(".venv/bin/python", sys.executable)
    shown = sh(*sshd.nodes.enter(0), "bash", "-c", f"cd {ROOT} && {command}")
    found = set(re.findall(r"^(\d node\d) light.py:\d+ in <module>: select", shown, re.M))
    # These nodes are one machine, with the same processes.
    assert found >= {f"{rank} {host}" for host in HOSTS for rank in range(4)}, shown
    os.kill(sshd.nodes.ranks()[3], signal.SIGKILL)
    assert job.wait().returncode == 1
    assert sshd.left() == []
    job = start(sshd, LIGHT, *FLAGS)
    read_until(job, r"^node\d: rank \d waits$", 4)
    job.process.kill()
    assert job.wait().returncode == -9


def test_an_address_beside_the_names(sshd):
    """IP replaces the first of HOSTS, which may be the name of a login."""
    settings = {"PYTHON": "echo", "IP": ADDRESSES[0], "HOSTS": "root@node0 root@node1"}
    done = start(sshd, "playground/collectives.py", **settings).wait()
    assert done.stdout.count(f" -ip {ADDRESSES[0]} ") == 2
