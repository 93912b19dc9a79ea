"""run/two_nodes_ssh.sh with real ssh servers starts a lesson on every node, and stops them all."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from conftest import LONG, ROOT, SHORT, Job, epochs, one_process
from nodes import HOSTS, LIGHT, PATIENT, STAYS, TRAVEL, VARIABLES, Nodes, read_until
from sshd import Sshd

SCRIPT = ROOT / "run" / "two_nodes_ssh.sh"
LESSON = "playground/distributed_data_parallel.py"
TORCHRUN_LESSON = "playground/distributed_data_parallel_torchrun.py"
STUBBORN = """\
import subprocess, sys, time
def launch(flags):
    if flags[flags.index("-nr") + 1] == "{failing}":
        sys.exit(3)
    for stubborn in "", "trap '' INT TERM; ":  # two ranks, of which the second ignores signals
        subprocess.Popen(["sh", "-c", stubborn + "echo waiting; while :; do sleep 0.1; done"])
    time.sleep(3600)
launch(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two nodes with ssh servers for all tests of this file."""
    with Nodes() as nodes, Sshd(nodes, tmp_path_factory.mktemp("sshd")) as sshd:
        yield sshd


@pytest.fixture
def sshd(servers):
    """The ssh servers. A test must leave no other process on the nodes."""
    yield servers
    left = servers.left()
    servers.end_others()  # so that a test that has failed does not let the next ones fail
    assert left == []


def start(sshd, *words, **settings):
    """Start the script on node 0, from another folder, with settings for its EDIT block."""
    settings = {"SSH": sshd.command, "PYTHON": sys.executable} | settings
    return Job(*sshd.nodes.enter(0), SCRIPT, *words, env=settings, cwd="/")


def test_the_lesson_gives_the_same_numbers(sshd, tmp_path):
    """Two nodes with a rank each print what one process prints.

    Special characters in flags and folders stay unchanged.
    """
    (tmp_path / "a checkout").symlink_to(ROOT)
    checkpoint = tmp_path / "it's in $HOME  &c.pt"
    settings = {"CHECKOUT": str(tmp_path / "a checkout"), "GPUS": "1"}
    done = start(sshd, LESSON, *SHORT, *PATIENT, "-s", checkpoint, **settings).wait()
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.splitlines()
    assert [line.split()[-1] for line in printed[1:3]] == ["node0", "node1"]
    assert all(line.startswith("node0: ") for line in printed)
    assert epochs(done.stdout.replace("node0: ", "")) == one_process(*SHORT)
    assert checkpoint.is_file()
    assert [line[:9] for line in done.stderr.splitlines()] == ["+ node0: ", "+ node1: "]


def test_a_lesson_for_torchrun_until_a_rank_is_killed(sshd, tmp_path):
    """A copy of the torchrun lesson in another folder is started by torchrun on each node.

    It prints the numbers of one process. When a rank is killed on node 1, no process stays.
    """
    (tmp_path / "my copy.py").write_text((ROOT / TORCHRUN_LESSON).read_text())
    # With this program in place of Python, the copy finds common/.
    (tmp_path / "python").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    flags = (*SHORT[:-1], LONG[-1], *PATIENT)
    settings = {"PYTHON": str(tmp_path / "python"), "GPUS": "1"}
    job = start(sshd, tmp_path / "my copy.py", *flags, **settings)
    printed = re.sub(r"^node[01]: ", "", read_until(job, r": epoch 2/"), flags=re.M)
    pids = sshd.nodes.ranks("my copy.py")
    assert epochs(printed)[:1] == one_process(*SHORT)
    os.kill(pids[1], signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_torchrun_is_stopped(sign, sshd):
    """Ctrl-C and kill -9 leave no process on any node.

    After kill -9, torchrun itself ends its ranks.
    """
    job = start(sshd, LIGHT, "--wait")
    read_until(job, r"^node\d: rank \d waits$", 4)
    if sign == signal.SIGINT:
        os.killpg(job.process.pid, sign)  # a terminal sends it to all processes
    else:
        job.process.send_signal(sign)
    assert job.wait().returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}[sign]


def test_a_point_to_point_lesson(sshd):
    """It starts its ranks itself."""
    flags = ("--device", "cpu", "--deadlock", *PATIENT)
    done = start(sshd, "playground/blocking_p2p.py", *flags, GPUS="1").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node0: rank 1: even ranks send first: received 0" in done.stdout
    command = "-n 2 -g 1 -nr 1 -ip node0 --port 8888 --device cpu --deadlock --timeout 300"
    assert command in done.stderr


@pytest.mark.parametrize("end", ["launch = print\nlaunch()\n", ""], ids=["launch", "torchrun"])
def test_which_variables_are_passed(end, sshd, tmp_path):
    """The variables of NCCL, gloo and torch are passed to the nodes, but not the choice of GPUs."""
    (tmp_path / "lesson.py").write_text(VARIABLES + end)
    done = start(sshd, tmp_path / "lesson.py", GPUS="1", **TRAVEL, **STAYS).wait()
    assert done.returncode == 0, done.stderr
    seen = dict(re.findall(r"^(node\d): node\d: (\{.*\})$", done.stdout, re.M))
    assert seen == dict.fromkeys(HOSTS, str(TRAVEL))


@pytest.mark.parametrize("failing", [0, 1])
def test_a_node_that_fails_stops_the_other(failing, sshd, tmp_path):
    """The script ends with the status of the node that failed, when the others have stopped."""
    (tmp_path / "lesson.py").write_text(STUBBORN.format(failing=failing))
    done = start(sshd, tmp_path / "lesson.py").wait()
    assert done.returncode == 3, done.stdout + done.stderr


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_can_be_stopped(sign, sshd, tmp_path):
    """Ctrl-C, kill and kill -9 leave no process on any node, even if it ignores them."""
    (tmp_path / "lesson.py").write_text(STUBBORN.format(failing="none"))
    job = start(sshd, tmp_path / "lesson.py")
    printed = read_until(job, "waiting$", 4).splitlines()
    assert sorted(printed) == ["node0: waiting"] * 2 + ["node1: waiting"] * 2
    if sign == signal.SIGINT:
        os.killpg(job.process.pid, sign)  # a terminal sends it to all processes
    else:
        job.process.send_signal(sign)
    status = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[sign]
    assert job.wait().returncode == status


@contextlib.contextmanager
def without(path):
    """Rename a file while the context lasts, so that it is missing."""
    path.rename(f"{path}.away")
    yield
    Path(f"{path}.away").rename(path)


def test_what_is_missing_is_one_line(sshd):
    """If a host, a key, a checkout or Python is missing, nothing is started.

    One line has what to do.
    """

    def error(*words, **settings):
        done = start(sshd, *words, **settings).wait()
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        [line] = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    choose = "choose one of playground/*.py"
    assert error("playground/none.py") == f"there is no playground/none.py: {choose}"
    alone = "playground/single_gpu.py is a single process: python playground/single_gpu.py, or use "
    assert error("playground/single_gpu.py").startswith(alone)
    unknown = error(HOSTS="node0 node7")
    assert unknown.startswith("cannot log in to node7 (ssh: Could not resolve hostname node7: ")
    assert unknown.endswith(": correct HOSTS, or add the host to /etc/hosts")
    assert error(CHECKOUT="/none") == f"node0 has no /none/{LESSON}: rsync -a ./ node0:/none"
    setup = f"{sshd.command} node0 {ROOT}/run/setup.sh"
    assert error(PYTHON="/no/python") == f"node0 has no /no/python in {ROOT}: {setup}"
    closed = f"{sshd.command} -p 23"
    assert error(SSH=closed).endswith(f"Connection refused): try this alone: {closed} node0")
    with without(sshd.folder / "known_hosts"):
        line = error()
    assert line.endswith(f"verification failed.): accept its key once: {sshd.command} node0")
    with without(sshd.folder / "key"):
        line = error()
    assert "Permission denied" in line
    assert line.endswith("): give it your key: ssh-copy-id node0")
