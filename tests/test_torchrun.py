"""The torchrun lesson: ranks by torchrun, on one node and on two, and torchrun's report."""

import os
import re
import signal

from conftest import (
    ASLEEP,
    LONG,
    ROOT,
    SHORT,
    Job,
    each_epoch,
    epochs,
    free_port,
    one_process,
    torchrun,
)
from test_errors import wait_for_line

LESSON = "distributed_data_parallel_torchrun"
PATH = ROOT / "playground" / f"{LESSON}.py"


def test_three_ranks_under_torchrun():
    """Only rank 0 prints the line of the ranks, and the epochs."""
    done = torchrun(LESSON, *SHORT, processes=3).wait()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "3 ranks, gloo, cpu"
    assert epochs(done.stdout) == one_process(*SHORT)


def test_two_nodes_on_one_machine():
    """torchrun twice, as on two nodes."""
    common = ["-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
    common += ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    one, zero = (Job(*common, "--node-rank", index, PATH, *SHORT, cold=False) for index in (1, 0))
    done, other = zero.wait(), one.wait()
    assert (done.returncode, other.returncode) == (0, 0), done.stderr + other.stderr
    assert done.stdout.splitlines()[0] == "2 ranks, gloo, cpu"
    assert epochs(done.stdout) == one_process(*SHORT)
    assert other.stdout == ""


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
    job = torchrun(LESSON, *LONG, cold=True)
    job.ranks(2)
    wait_for_line(job, "epoch 2/")
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.wait().returncode != 0


def test_the_report_names_the_cause(tmp_path):
    """torchrun's report has the traceback of a rank that fails, because of @record."""
    text = PATH.read_text()
    line = "    torch.manual_seed(args.seed)\n"
    assert text.count(line) == 1
    copy = tmp_path / "changed.py"
    fails = '    assert rank == 0, "a mistake on one rank"\n'
    copy.write_text(text.replace(line, f"{line}    {ASLEEP}\n{fails}"))
    # Forked ranks would fail in the same second, and torchrun compares seconds.
    done = torchrun(copy, *SHORT, cold=True).wait()
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("Root Cause") :]
    assert re.search(r"rank +: 1", report)
    assert "a mistake on one rank" in report
