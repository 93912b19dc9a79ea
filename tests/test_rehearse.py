"""run/rehearse_two_nodes.sh: several nodes on one machine, which exist as long as the script.

test_run_readme.py runs the torchrun lesson in it.
"""

import os
import re
import signal
import sys

import pytest
from launch import SHORT, Job, epochs, one_line, one_process
from lessons import ROOT, docstring
from nodes import HOSTS, need

SCRIPT = "../run/rehearse_two_nodes.sh"  # as seen from tests/
LESSON = "playground/distributed_data_parallel.py"
NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
WAIT = "trap '' INT TERM; echo waiting; sleep 3600"  # a command that only kill -9 can end


@pytest.fixture(params=[(), NOBODY], ids=["root", "nobody"])
def prefix(request):
    """What changes to a user, root or one without rights, who can make networks here."""
    need("ip", "tc", "ping")
    done = rehearse("true", prefix=request.param).wait()
    if request.param and done.returncode:
        pytest.skip(f"users cannot read the script or make networks here: {done.stderr.strip()}")
    return request.param


def rehearse(*words, prefix=(), env=None, **settings):
    """Start the script from another folder, with settings for its EDIT block."""
    env = {"PYTHON": sys.executable} | (env or {}) | settings
    return Job(*prefix, SCRIPT, *words, env=env, cwd=ROOT / "tests")


def lines(text, node):
    """Return the lines of a node, without its name."""
    return "".join(re.findall(rf"^node{node}: (.*\n)", text, re.M))


def test_what_the_lesson_gets():
    """By default it is the DDP lesson. Its flags are the node's and, unchanged, the user's."""
    need("ip")
    done = rehearse(PYTHON="/bin/echo", NODES="3", GPUS="4").wait()
    for node in range(3):
        flags = f"{LESSON} -n 3 -g 4 -nr {node} -ip 10.77.0.1 --device cpu\n"
        assert lines(done.stdout, node) == flags
    done = rehearse(LESSON, "-ip", "it's $HOME  ", PYTHON="/bin/echo").wait()
    assert lines(done.stdout, 1).endswith("-ip 10.77.0.1 --device cpu -ip it's $HOME  \n")


def test_what_another_script_gets(tmp_path):
    """It has flags of its own, and gets no others: under torchrun, or started as it is."""
    need("ip")
    script = tmp_path / "my_script.py"
    script.write_text("# torchrun starts it\n")
    done = rehearse(script, "--width", "3", PYTHON="/bin/echo", GPUS="1").wait()
    assert lines(done.stdout, 1).endswith(f" {script} --width 3\n"), done.stdout
    script.write_text("mp.spawn(work, nprocs=2)\n")
    done = rehearse(script, "--width", "3", PYTHON="/bin/echo").wait()
    assert lines(done.stdout, 1) == f"{script} --width 3\n"


def test_a_command_runs_on_all_nodes(prefix):
    """Each node has its host name, its address and the limit, and it reaches the other nodes."""
    command = "hostname; echo $NODE_RANK $NODE0; ip -o -4 addr show eth0; tc qdisc show dev eth0; "
    command += "for i in 0 1 2; do ping -c 1 -W 5 node$i >/dev/null && echo reached node$i; done"
    done = rehearse("sh", "-c", command, prefix=prefix, NODES="3", BANDWIDTH="100mbit").wait()
    assert done.returncode == 0, done.stdout + done.stderr
    reached = [f"reached node{each}" for each in range(3)]
    for node in range(3):
        host, variables, address, limit, *pings = lines(done.stdout, node).splitlines()
        assert (host, variables, pings) == (f"node{node}", f"{node} 10.77.0.1", reached)
        assert f"inet 10.77.0.{node + 1}/24" in address
        assert "tbf" in limit and "rate 100Mbit" in limit


def test_the_end_of_a_node_or_of_the_script_ends_all(prefix):
    """A node that fails, Ctrl-C, kill and kill -9 leave no process, even if it ignores signals."""
    job = rehearse("bash", "-c", f"[ $NODE_RANK = 1 ] && exit 3; {WAIT}", prefix=prefix)
    assert job.wait().returncode == 3
    for sign, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        job = rehearse("bash", "-c", WAIT, prefix=prefix)
        printed = {job.process.stdout.readline() for _ in HOSTS}
        assert printed == {"node0: waiting\n", "node1: waiting\n"}
        if sign == signal.SIGINT:
            os.killpg(job.process.pid, sign)  # a terminal sends it to all processes
        else:
            job.process.send_signal(sign)
        assert job.wait().returncode == status


def test_hosts_as_debian_installs_them():
    """Each host's name leads to 127.0.1.1: the ordered commands train, and check_node.sh tells."""
    need("ip")
    flags = (*SHORT, "--timeout", 300)
    done = rehearse(LESSON, *flags, NAMES_AT="127.0.1.1", GPUS="1").wait()
    assert epochs(lines(done.stdout, 0)) == one_process(*SHORT)
    # The command of two nodes in the docstring of lesson 9, as it is typed on each of them.
    text = docstring("distributed_data_parallel_torchrun")
    command = re.search(r"^    (torchrun --nnodes 2 .*\\\n.*)$", text, re.M)[1]
    command = command.replace("<ip of node 0>", "$NODE0").replace("rank 0", "rank $NODE_RANK")
    command = command.replace("torchrun", f"{sys.executable} -m torch.distributed.run", 1)
    words = " ".join(map(str, flags))
    done = rehearse("bash", "-c", f"{command} {words}", NAMES_AT="127.0.1.1").wait()
    assert epochs(lines(done.stdout, 0)) == one_process(*SHORT), done.stderr
    done = rehearse("run/check_node.sh", NAMES_AT="127.0.1.1").wait()
    assert done.returncode == 0
    for node in range(2):
        assert "leads to 127.0.1.1" in lines(done.stdout, node)
        assert "own: export GLOO_SOCKET_IFNAME=eth0\n" in lines(done.stdout, node)


def test_where_networks_cannot_be_made():
    """One line has what to do."""
    need("ip")
    # bash finds this function before the program unshare.
    refusal = "() { echo unshare: Operation not permitted >&2; return 1; }"
    done = rehearse("true", env={"BASH_FUNC_unshare%%": refusal}).wait()
    assert (done.returncode, done.stdout) == (1, "")
    one_line(done, "cannot be made here (unshare: Operation not permitted): use sudo, or docker's")
