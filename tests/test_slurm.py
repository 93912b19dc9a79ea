"""The Slurm jobs in run/, submitted to a real Slurm cluster of two nodes."""

import os
import signal

import pytest
from conftest import LONG, SHORT, epochs, one_process
from nodes import FLAGS, HOSTS, LIGHT, PATIENT, Nodes, check_places, variables
from slurm import Slurm, wait_for

SRUN = "run/slurm_srun.sbatch"
TORCHRUN = "run/slurm_torchrun.sbatch"
LESSON = "playground/distributed_data_parallel_torchrun.py"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster for all tests of this file."""
    with Nodes() as nodes, Slurm(nodes, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def test_training_until_scancel(slurm):
    """Two nodes with a rank each print the numbers of single_gpu.py. scancel ends both."""
    flags = (*SHORT[:-1], LONG[-1], *PATIENT)
    job, output = slurm.submit("--ntasks-per-node", 1, SRUN, LESSON, *flags)
    text = wait_for(output, r"^epoch 1/.*\n")
    assert "2 ranks, gloo, cpu\n" in text
    assert epochs(text)[:1] == one_process(*SHORT)
    assert slurm.command("scancel", job).returncode == 0
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    assert slurm.left() == []


@pytest.mark.parametrize(
    ("flags", "threads"),
    [
        (("--cpus-per-task", 2, "--export", "PATH,SLURM_CONF", SRUN), 2),
        ((SRUN,), 7),
        ((TORCHRUN,), 7),
    ],
    ids=["srun", "srun with OMP_NUM_THREADS", "torchrun"],
)
def test_what_each_rank_is_told_until_one_is_killed(flags, threads, slurm):
    """Each of two ranks on each of two nodes gets its place, its flags and its threads.

    A rank of srun has a thread for each core of its task, unless OMP_NUM_THREADS is set. When a
    rank is killed, the job is FAILED and no process stays.
    """
    job, output = slurm.submit(*flags, LIGHT, *FLAGS, OMP_NUM_THREADS="7")
    text = wait_for(output, r"^rank \d waits$", 4)
    check_places(text, *FLAGS)
    for seen in map(variables(text).get, HOSTS):
        assert f"'OMP_NUM_THREADS': '{threads}'" in seen
    os.kill(slurm.nodes.ranks()[1], signal.SIGKILL)
    assert slurm.wait(job)["JobState"] == "FAILED", output.read_text()
    assert slurm.left() == []
