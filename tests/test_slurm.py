"""The Slurm jobs in run/, submitted to a real Slurm cluster of two nodes."""

import os
import re
import signal
import subprocess

import pytest
from conftest import LONG, ROOT, SHORT, epochs, one_process
from nodes import LIGHT, PATIENT, PLACES, Nodes
from slurm import Slurm, wait_for

JOBS = ["run/slurm_srun.sbatch", "run/slurm_torchrun.sbatch"]
LESSON = "playground/distributed_data_parallel_torchrun.py"
SPAWNING = "playground/distributed_data_parallel.py"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster for all tests of this file."""
    with Nodes() as nodes, Slurm(nodes, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def submit(slurm, *words, cwd=ROOT, **env):
    """Submit a job whose output is written to the cluster's folder. Returns its id and output."""
    job = slurm.submit("--output", slurm.folder / "%j.out", *words, cwd=cwd, env=env)
    return job, slurm.folder / f"{job}.out"


@pytest.mark.parametrize("script", JOBS)
def test_training_until_a_rank_is_killed(script, slurm):
    """Two nodes with a rank each print the numbers of single_gpu.py.

    When a rank is killed, the job is FAILED and no process stays.
    """
    flags = (*SHORT[:-1], LONG[-1], *PATIENT)
    job, output = submit(slurm, "--ntasks-per-node", 1, script, LESSON, *flags, GPUS="1")
    text = wait_for(output, r"^epoch 2/")
    assert "2 ranks, gloo, cpu\n" in text
    pids = slurm.nodes.ranks()
    assert epochs(text)[:1] == one_process(*SHORT)
    os.kill(pids[1], signal.SIGKILL)
    assert slurm.wait(job)["JobState"] == "FAILED", output.read_text()
    assert re.search("task 1: Killed|Signal 9 .SIGKILL. received", output.read_text())
    assert slurm.left() == []


def test_the_threads_of_each_process(slurm, tmp_path):
    """A process has as many threads as its task has cores, unless OMP_NUM_THREADS is set."""
    script = tmp_path / "threads.py"
    rank_and_threads = 'os.environ["RANK"], "threads", os.environ["OMP_NUM_THREADS"]'
    script.write_text(f"import os\nprint({rank_and_threads})\n")
    for export, threads in (("PATH,SLURM_CONF", "2"), ("PATH,SLURM_CONF,OMP_NUM_THREADS=7", "7")):
        flags = ("--export", export, "--ntasks-per-node", 1, "--cpus-per-task", 2)
        job, output = submit(slurm, *flags, JOBS[0], script)
        assert slurm.wait(job)["JobState"] == "COMPLETED"
        text = output.read_text()
        assert re.findall(r"^\d threads (\d)$", text, re.M) == [threads] * 2, text


@pytest.mark.parametrize("script", JOBS)
def test_what_each_rank_is_told_and_scancel(script, slurm):
    """Each of two ranks on each of two nodes gets its place, and a flag with a space.

    scancel ends all of them.
    """
    job, output = submit(slurm, script, LIGHT, "--wait", "a folder/c.pt")
    text = wait_for(output, r"^rank \d waits$", 4)
    flags = ", flags ['--wait', 'a folder/c.pt']"
    assert sorted(re.findall("^rank .* of .*", text, re.M)) == [place + flags for place in PLACES]
    assert slurm.command("scancel", job).returncode == 0
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    assert slurm.left() == []


@pytest.mark.parametrize("script", JOBS)
def test_what_is_missing_is_one_line(script, slurm):
    """A job without sbatch, the checkout, a lesson or Python, or for another launcher, ends."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(["bash", ROOT / script], env=alone, capture_output=True, text=True)
    assert done.returncode == 1
    outside = r"error: this is not inside a Slurm job: sbatch .+ playground/\S+\n"
    assert re.fullmatch(outside, done.stderr)
    elsewhere = r"\S+ is not the checkout: cd .*sbatch.*"
    spawning = rf'{SPAWNING} starts its own processes: HOSTS="node0 node1" run/two_nodes_ssh.sh.*'
    for words, cwd, status, pattern in (
        ([ROOT / script, LESSON], slurm.folder, 1, elsewhere),
        ([script], ROOT, 2, rf"no lesson: sbatch {script} playground/\S+"),
        ([script, SPAWNING], ROOT, 2, spawning),
        (["--export=ALL,PYTHON=/no", script, LESSON], ROOT, 1, "/no is missing: run/setup.sh"),
    ):
        job, output = submit(slurm, *words, cwd=cwd)
        assert slurm.wait(job)["ExitCode"] == f"{status}:0"
        assert re.fullmatch(f"error: {pattern}\n", output.read_text()), output.read_text()
