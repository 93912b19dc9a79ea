"""The Slurm jobs in run/, submitted to a real Slurm cluster of two nodes."""

import os
import re
import signal
import sys
import time

import pytest
from launch import DIGITS, each_epoch, epochs, one_process, python_path
from lessons import ROOT
from nodes import FLAGS, HOSTS, LIGHT, PATIENT, Nodes, check_places, until, variables
from slurm import Slurm, wait_for

SRUN = "run/slurm_srun.sbatch"
TORCHRUN = "run/slurm_torchrun.sbatch"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster for all tests of this file."""
    with Nodes() as nodes, Slurm(nodes, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


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


HANGS = """import time
import torch
import torch.distributed as dist
def work(rank):
    number = torch.ones(1)
    dist.all_reduce(number)
    if rank == 2:
        time.sleep(9999)
    dist.all_reduce(number)
dist.init_process_group("gloo")
print("starts", flush=True)
work(dist.get_rank())
"""


def test_the_stacks_of_all_nodes(slurm, tmp_path):
    """One command counts the lines at which the ranks are, as hangs.md shows. The odd one is first.

    With LOGS, each rank writes a file.
    """
    (tmp_path / "my_script.py").write_text(HANGS)
    job, _ = slurm.submit(SRUN, tmp_path / "my_script.py", LOGS=str(tmp_path / "logs"))
    for rank in range(4):
        wait_for(tmp_path / "logs" / f"rank{rank}.txt", "^starts$")
    page = (ROOT / "playground" / "pages" / "hangs.md").read_text()
    command, shown = re.search(
        r"^    (srun --jobid .*?)\n\n.*?((?:^ {4} +\d \d [^\n]*\n)+)", page, re.M | re.S
    ).groups()
    command = command.replace("4242", str(job)).replace(".venv/bin/python", sys.executable)
    shown = " ".join(re.findall(r"\S+", shown))

    def all_wait():
        done = slurm.command("bash", "-c", command)
        return " ".join(re.findall(r"\S+", done.stdout)) == shown

    until(all_wait, lambda: slurm.command("bash", "-c", command), 60)
    slurm.command("scancel", job)
    slurm.wait(job)
    assert slurm.left() == []


THREE = (*DIGITS, "--batch_size", 120, "--epochs", 3, "--double")


@pytest.fixture
def run(slurm, tmp_path):
    """Return a function that submits resumable.py, and the log of the run.

    It waits in the second epoch until a signal asks it to stop. Resumed there, it does not wait.
    """
    wait = "while (epoch, progress['step']) == (1, 0) and not asked: time.sleep(0.1)"
    copy = each_epoch("resumable", wait, tmp_path)
    folder = tmp_path / "run"

    def submit(*words):
        env = {"PYTHONPATH": python_path(copy), "GPUS": "1"}
        flags = (copy, *THREE, *PATIENT, "--run_dir", folder)
        return slurm.submit("--ntasks-per-node", 1, *words, *flags, **env)

    return submit, folder / "log.txt"


def check_log(log):
    """The run stopped once, after ten steps of epoch 2. Its numbers are those of one process."""
    text = log.read_text()
    assert text.count("stopped after step 10 of epoch 2\n") == text.count("stopped") == 1
    assert "epoch-000001.pt: 1 of 3 epochs and 10 steps are done\n" in text
    assert epochs(text) == one_process(*THREE, apart=2e-12)


@pytest.mark.parametrize("script", [SRUN, TORCHRUN])
def test_the_time_limit(script, run, slurm):
    """A minute before it, the ranks save and leave. The next job resumes with the same command."""
    submit, log = run
    words = ("--job-name", "one-run", "--dependency", "singleton", script)
    start = time.monotonic()
    job, output = submit(*words)
    following, _ = submit(*words)
    wait_for(output, r"^epoch 1/.*\n")
    minutes = int(time.monotonic() - start) // 60 + 2
    done = slurm.command("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes}")
    assert done.returncode == 0, done.stderr
    assert slurm.wait(following)["JobState"] == "COMPLETED"
    found = slurm.show(job)
    assert [found["JobState"], found["ExitCode"]] == ["COMPLETED", "0:0"], output.read_text()
    check_log(log)


def test_a_job_of_higher_priority(run, slurm):
    """It preempts the run, which saves at SIGTERM, and later resumes in the same job."""
    submit, log = run
    job, output = submit("--requeue", "--open-mode", "append", SRUN)
    wait_for(output, r"^epoch 1/.*\n")
    urgent, _ = slurm.submit("--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true")
    assert slurm.wait(urgent)["JobState"] == "COMPLETED"
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")  # not in two minutes
    found = slurm.wait(job)
    assert [found["JobState"], found["Restarts"]] == ["COMPLETED", "1"], output.read_text()
    check_log(log)
