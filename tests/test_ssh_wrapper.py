"""run/two_nodes_ssh.sh with real ssh servers starts a lesson on every node, and stops them all."""

import os
import re
import signal
import sys

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


def test_a_lesson_for_torchrun_until_a_rank_is_killed(sshd):
    """torchrun starts it on each node, with the numbers of one process. A kill ends all."""
    flags = (*SHORT[:-1], LONG[-1], *PATIENT)
    job = start(sshd, TORCHRUN_LESSON, *flags, GPUS="1")
    printed = re.sub(r"^node[01]: ", "", read_until(job, r": epoch 2/"), flags=re.M)
    pids = sshd.nodes.ranks()
    assert epochs(printed)[:1] == one_process(*SHORT)
    os.kill(pids[1], signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 1, done.stderr
    assert "Signal 9 (SIGKILL)" in done.stdout


def test_kill_9_ends_torchrun_everywhere(sshd):
    """After kill -9 of the script no process stays: torchrun itself ends its ranks."""
    job = start(sshd, LIGHT, "--wait")
    read_until(job, r"^node\d: rank \d waits$", 4)
    job.process.kill()
    assert job.wait().returncode == -9


@pytest.mark.parametrize("end", ["launch = print\nlaunch()\n", ""], ids=["launch", "torchrun"])
def test_which_variables_are_passed(end, sshd, tmp_path):
    """The variables of NCCL, gloo and torch are passed to the nodes, but not the choice of GPUs."""
    (tmp_path / "lesson.py").write_text(VARIABLES + end)
    done = start(sshd, tmp_path / "lesson.py", GPUS="1", **TRAVEL, **STAYS).wait()
    assert done.returncode == 0, done.stderr
    seen = dict(re.findall(r"^(node\d): node\d: (\{.*\})$", done.stdout, re.M))
    assert seen == dict.fromkeys(HOSTS, str(TRAVEL))


def test_the_end_of_a_node_or_of_the_script_ends_all(sshd, tmp_path):
    """A node that fails, and Ctrl-C, leave no process on any node, even if it ignores signals."""
    (tmp_path / "lesson.py").write_text(STUBBORN.format(failing=1))
    done = start(sshd, tmp_path / "lesson.py").wait()
    assert done.returncode == 3, done.stdout + done.stderr
    assert sshd.left() == []
    (tmp_path / "lesson.py").write_text(STUBBORN.format(failing="none"))
    job = start(sshd, tmp_path / "lesson.py")
    printed = read_until(job, "waiting$", 4).splitlines()
    assert sorted(printed) == ["node0: waiting"] * 2 + ["node1: waiting"] * 2
    os.killpg(job.process.pid, signal.SIGINT)  # a terminal sends it to all processes
    assert job.wait().returncode == 130


def test_what_is_missing_is_one_line(sshd):
    """If a host, a key, a checkout or Python is missing, nothing starts. A line has what to do."""

    def error(*words, **settings):
        done = start(sshd, *words, **settings).wait()
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        [line] = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    choose = "choose one of playground/*.py"
    assert error("playground/none.py") == f"there is no playground/none.py: {choose}"
    assert "is a single process: python" in error("playground/single_gpu.py")
    unknown = error(HOSTS="node0 node7")
    assert unknown.startswith("cannot log in to node7 (ssh: Could not resolve hostname node7: ")
    assert unknown.endswith(": correct HOSTS, or add the host to /etc/hosts")
    assert error(CHECKOUT="/none") == f"node0 has no /none/{LESSON}: rsync -a ./ node0:/none"
    setup = f"{sshd.command} node0 {ROOT}/run/setup.sh"
    assert error(PYTHON="/no/python") == f"node0 has no /no/python in {ROOT}: {setup}"
    closed = f"{sshd.command} -p 23"
    assert error(SSH=closed).endswith(f"Connection refused): try this alone: {closed} node0")
    for name, advice in (
        ("known_hosts", f"verification failed.): accept its key once: {sshd.command} node0"),
        ("key", "): give it your key: ssh-copy-id node0"),
    ):
        (sshd.folder / name).rename(sshd.folder / "away")
        line = error()
        (sshd.folder / "away").rename(sshd.folder / name)
        assert line.endswith(advice)
