"""run/two_nodes_ssh.sh with real ssh servers starts a lesson on every node, and stops them all.

test_pbs.py trains with it.
"""

import os
import signal
import sys

import pytest
from conftest import ROOT, Job, one_line
from nodes import FLAGS, HOSTS, LIGHT, STAYS, TRAVEL, Nodes, check_places, read_until, variables
from sshd import Sshd

SCRIPT = ROOT / "run" / "two_nodes_ssh.sh"
LESSON = "playground/distributed_data_parallel.py"
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
launch(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    """Two nodes with ssh servers for all tests of this file."""
    with Nodes() as nodes, Sshd(nodes, tmp_path_factory.mktemp("sshd")) as sshd:
        yield sshd


@pytest.fixture(autouse=True)
def nothing_is_left(sshd):
    """A test must leave no process on the nodes but the servers."""
    yield
    assert sshd.left() == []


def start(sshd, *words, **settings):
    """Start the script on node 0, from another folder, with settings for its EDIT block."""
    settings = {"SSH": sshd.command, "PYTHON": sys.executable} | settings
    return Job(*sshd.nodes.enter(0), SCRIPT, *words, env=settings, cwd="/")


def test_a_lesson_that_starts_its_ranks_until_ctrl_c(sshd, tmp_path):
    """Each node gets its flags, the user's unchanged, and the variables of NCCL, gloo and torch.

    After Ctrl-C no process stays on any node, even if it ignores signals.
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
    os.killpg(job.process.pid, signal.SIGINT)  # a terminal sends it to all processes
    done = job.wait()
    assert done.returncode == 130
    assert [line[:9] for line in done.stderr.splitlines()] == ["+ node0: ", "+ node1: "]


def test_a_node_that_fails_ends_all(sshd, tmp_path):
    """The script ends with the status of node 1, and node 0 has no process, either."""
    (tmp_path / "lesson.py").write_text(STUBBORN.replace("FAILING", "'1'"))
    done = start(sshd, tmp_path / "lesson.py").wait()
    assert done.returncode == 3, done.stdout + done.stderr


def test_a_lesson_for_torchrun_until_kill_9(sshd):
    """torchrun starts two ranks on each node, with the flags and the same variables.

    After kill -9 of the script no process stays: torchrun itself ends its ranks.
    """
    job = start(sshd, LIGHT, *FLAGS, **TRAVEL, **STAYS)
    text = read_until(job, r"^node\d: rank \d waits$", 4)
    check_places(text, *FLAGS)
    assert variables(text) == dict.fromkeys(HOSTS, str(TRAVEL))
    job.process.kill()
    assert job.wait().returncode == -9


def test_what_is_missing_is_one_line(sshd):
    """If a host, a key, a checkout or Python is missing, nothing starts. A line has what to do."""

    def refused(*words, said, **settings):
        done = start(sshd, *words, **settings).wait()
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        one_line(done, *said)

    refused("playground/none.py", said=["there is no playground/none.py: choose one of"])
    refused("playground/single_gpu.py", said=["is a single process: python"])
    unknown = ["cannot log in to node7", ": correct HOSTS, or add the host to /etc/hosts"]
    refused(HOSTS="node0 node7", said=unknown)
    refused(CHECKOUT="/none", said=[f"node0 has no /none/{LESSON}: rsync -a ./ node0:/none"])
    setup = f"{sshd.command} node0 {ROOT}/run/setup.sh"
    refused(PYTHON="/no/python", said=[f"node0 has no /no/python in {ROOT}: {setup}"])
    closed = f"{sshd.command} -p 23"
    refused(SSH=closed, said=[f"Connection refused): try this alone: {closed} node0"])
    for name, advice in (
        ("known_hosts", f"verification failed.): accept its key once: {sshd.command} node0"),
        ("key", "): give it your key: ssh-copy-id node0"),
    ):
        (sshd.folder / name).rename(sshd.folder / "away")
        refused(said=[advice])
        (sshd.folder / "away").rename(sshd.folder / name)
