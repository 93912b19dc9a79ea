"""The torchrun lesson on one node: its numbers, and Ctrl-C.

test_torchrun_node.py has two nodes, and test_resumable.py a rank that is killed.
"""

import os
import signal

from conftest import LONG, SHORT, epochs, one_process, torchrun
from nodes import read_until


def test_three_ranks_until_ctrl_c():
    """Only rank 0 prints the line of the ranks, and the epochs. Ctrl-C leaves no process."""
    job = torchrun("distributed_data_parallel_torchrun", *SHORT[:-1], LONG[-1], processes=3)
    text = read_until(job, r"^epoch 1/.*\n")
    assert text.startswith("3 ranks, gloo, cpu\nepoch 1/")
    assert epochs(text) == one_process(*SHORT)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode != 0
