"""run/rehearse_two_nodes.sh: two nodes on one machine, which exist as long as the script."""

import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, SHORT, Job, epochs, one_process
from nodes import HOSTS, LIGHT, PATIENT, PLACES, need

SCRIPT = "../run/rehearse_two_nodes.sh"  # as seen from tests/
LESSON = "playground/distributed_data_parallel.py"
TORCHRUN_LESSON = "playground/distributed_data_parallel_torchrun.py"
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
WAIT = "trap '' INT TERM; echo waiting; sleep 3600"  # a command that only kill -9 can end


@pytest.fixture(autouse=True)
def programs():
    """Skip the tests if the script cannot work here."""
    need("ip", "tc", "ping")


def rehearse(*words, prefix=(), env=None, **settings):
    """Start the script from another folder, with settings for its EDIT block."""
    env = {"PYTHON": sys.executable} | (env or {}) | settings
    return Job(*prefix, SCRIPT, *words, env=env, cwd=ROOT / "tests")


def readable(prefix):
    """Return whether the user that `prefix` changes to can read the script."""
    command = [*prefix, "test", "-r", ROOT / "run" / "rehearse_two_nodes.sh"]
    return subprocess.run(command).returncode == 0


def lines(text, node):
    """Return the lines of a node, without its name."""
    return "".join(re.findall(rf"^node{node}: (.*\n)", text, re.M))


def test_the_lesson_gives_the_same_numbers_on_a_slow_network():
    """Two nodes with a rank each and 100 Mbit/s between them print what one process prints."""
    done = rehearse(LESSON, *SHORT, *PATIENT, BANDWIDTH="100mbit", GPUS="1").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    table = lines(done.stdout, 0).splitlines()[1:3]
    assert [row.split()[-1] for row in table] == ["node0", "node1"]
    assert epochs(lines(done.stdout, 0)) == one_process(*SHORT)
    assert [line[:9] for line in done.stderr.splitlines()] == ["+ node0: ", "+ node1: "]


def test_a_lesson_for_torchrun(tmp_path):
    """A lesson in another folder is started by torchrun on each node, on the CPU.

    test_run_readme.py runs the real lesson.
    """
    copy = tmp_path / "mine.py"
    copy.write_text((ROOT / LIGHT).read_text())
    done = rehearse(copy, "--flag", "a b").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    flags = ", flags ['--device', 'cpu', '--flag', 'a b']"
    ranks = sorted(re.findall(r"^node\d: (rank .*)", done.stdout, re.M))
    assert ranks == [place + flags for place in PLACES]


def test_a_point_to_point_lesson():
    """It starts its ranks itself, and it gets its own flags."""
    done = rehearse("playground/blocking_p2p.py", "--deadlock", *PATIENT, GPUS="1").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node0: rank 1: even ranks send first: received 0" in done.stdout


def test_a_wrong_address_fails_as_on_a_cluster():
    """The user's -ip replaces the script's, and the lesson's last line has what to check."""
    done = rehearse("playground/blocking_p2p.py", "-ip", "10.77.0.9", "--timeout", 5).wait()
    assert done.returncode == 1
    expected = r"^node\d: All 4 ranks must connect to tcp://10.77.0.9:8888: "
    assert re.search(expected, done.stdout, re.M)


def test_without_words_it_is_the_ddp_lesson():
    """Each node gets -n, -g, its own -nr and node 0's address. Flags are passed unchanged."""
    done = rehearse(PYTHON="/bin/echo", GPUS="3").wait()
    for node in range(2):
        flags = f"{LESSON} -n 2 -g 3 -nr {node} -ip 10.77.0.1 --device cpu\n"
        assert lines(done.stdout, node) == flags
    done = rehearse(LESSON, "-s", "it's $HOME  ", PYTHON="/bin/echo").wait()
    assert lines(done.stdout, 1).endswith("-s it's $HOME  \n")


@pytest.mark.parametrize("prefix", [(), NOBODY], ids=["root", "nobody"])
def test_a_command_runs_on_both_nodes(prefix):
    """Each node has its host name, its address and the limit, and it reaches the other node.

    This works for root and for a user without rights.
    """
    if prefix:
        command = [*prefix, "unshare", "--map-root-user", "--net", "true"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"users cannot make networks here: {done.stderr.strip()}")
        if not readable(prefix):
            pytest.skip(f"users cannot read {ROOT}")
    command = "hostname; echo $NODE_RANK $NODE0; ip -o -4 addr show eth0; tc qdisc show dev eth0; "
    command += 'ping -c 1 -W 5 "node$((1 - NODE_RANK))" >/dev/null && echo reached'
    done = rehearse("sh", "-c", command, prefix=prefix, BANDWIDTH="100mbit").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    for node in range(2):
        host, variables, address, limit, ping = lines(done.stdout, node).splitlines()
        assert (host, variables, ping) == (HOSTS[node], f"{node} 10.77.0.1", "reached")
        assert f"inet 10.77.0.{node + 1}/24" in address
        assert "tbf" in limit and "rate 100Mbit" in limit


@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_fails_stops_the_other(node):
    """The script ends with the status of the node that failed."""
    done = rehearse("bash", "-c", f"[ $NODE_RANK = {node} ] && exit 3; {WAIT}").wait()
    assert done.returncode == 3


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("prefix", [(), NOBODY], ids=["root", "nobody"])
def test_it_can_be_stopped(prefix, sign):
    """Ctrl-C, kill and kill -9 leave no process on any node, even if it ignores them."""
    if prefix:
        done = rehearse("true", prefix=prefix).wait()
        if done.returncode:
            pytest.skip(f"users cannot make networks here: {done.stderr.strip()}")
    job = rehearse("bash", "-c", WAIT, prefix=prefix)
    printed = {job.process.stdout.readline() for _ in HOSTS}
    assert printed == {"node0: waiting\n", "node1: waiting\n"}
    if sign == signal.SIGINT:
        os.killpg(job.process.pid, sign)  # a terminal sends it to all processes
    else:
        job.process.send_signal(sign)
    status = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[sign]
    assert job.wait().returncode == status


def test_what_is_missing_is_one_line():
    """If a lesson, Python, a right or a kernel feature is missing, one line has what to do."""

    def error(*words, **options):
        done = rehearse(*words, **options).wait()
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        [line] = done.stderr.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    choose = "choose one of playground/*.py"
    assert error("playground/none.py") == f"there is no playground/none.py: {choose}"
    alone = "playground/single_gpu.py is a single process: python playground/single_gpu.py, or use "
    assert error("playground/single_gpu.py") == f"{alone}{TORCHRUN_LESSON}"
    assert error(PYTHON="/no/python") == "there is no /no/python: run/setup.sh"
    assert "use other values of BANDWIDTH" in error("true", BANDWIDTH="fast")
    assert "use other values of BANDWIDTH" in error("true", DELAY="soon")
    # bash finds this function before the program unshare.
    refusal = "() { echo unshare: Operation not permitted >&2; return 1; }"
    refused = {"BASH_FUNC_unshare%%": refusal}
    here = "networks cannot be made here (unshare: Operation not permitted): "
    container = "leave this container, or start it with --privileged"
    assert error("true", env=refused) == f"{here}{container}"
    if readable(NOBODY):
        line = error("true", env=refused, prefix=NOBODY)
        assert line == f"{here}sudo run/rehearse_two_nodes.sh true"
