"""The torchrun lesson on one node: its numbers, a rank that is killed, Ctrl-C.

test_torchrun_node.py has two nodes, and test_break_it.py the report of an error.
"""

import os
import signal

from conftest import ASLEEP, LONG, SHORT, each_epoch, epochs, one_process, torchrun
from test_errors import wait_for_line

LESSON = "distributed_data_parallel_torchrun"


def test_three_ranks_under_torchrun():
    """Only rank 0 prints the line of the ranks, and the epochs."""
    done = torchrun(LESSON, *SHORT, processes=3).wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "3 ranks, gloo, cpu"
    assert epochs(done.stdout) == one_process(*SHORT)


def test_without_restarts_a_killed_rank_ends_the_run(tmp_path):
    """torchrun ends the other rank and reports the signal; nothing is left."""
    job = torchrun(each_epoch(LESSON, ASLEEP, tmp_path), *LONG)
    os.kill(job.ranks(2)[1], signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 1
    assert "Signal 9 (SIGKILL)" in done.stderr


def test_with_restarts_it_begins_again(tmp_path):
    """A rank is killed: all ranks start again from the first epoch, with the same numbers."""
    flags = (*SHORT[:-1], 4)
    restarting = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    still = 'time.sleep(999 * (epoch == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))'
    job = torchrun(each_epoch(LESSON, still, tmp_path), *flags, restarts=2, env=restarting)
    victim = job.ranks(2)[1]
    wait_for_line(job, "epoch 3/")
    os.kill(victim, signal.SIGKILL)
    done = job.wait()
    assert done.returncode == 0, done.stderr
    # The lines of the first start have been read above.
    assert epochs(done.stdout) == one_process(*flags)


def test_ctrl_c_under_torchrun():
    """Ctrl-C reaches torchrun and the ranks; none is left."""
    job = torchrun(LESSON, *LONG)
    job.ranks(2)
    wait_for_line(job, "epoch 2/")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode != 0
