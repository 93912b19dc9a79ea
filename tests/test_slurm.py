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


def submit_one_each(slurm, *words):
    """Submit a job with one rank on each node. Both kinds of jobs accept the flags."""
    return submit(slurm, "--ntasks-per-node", 1, *words, GPUS="1")


@pytest.mark.parametrize("script", JOBS)
def test_training_until_a_rank_is_killed(script, slurm):
    """Two nodes with a rank each print the numbers of single_gpu.py.

    When a rank is killed, the job is FAILED and no process stays.
    """
    flags = (*SHORT[:-1], LONG[-1], *PATIENT)
    job, output = submit_one_each(slurm, script, LESSON, *flags)
    text = wait_for(output, r"^epoch 2/")
    assert "2 ranks, gloo, cpu\n" in text
    pids = slurm.nodes.ranks()
    assert epochs(text)[:1] == one_process(*SHORT)
    os.kill(pids[1], signal.SIGKILL)
    assert slurm.wait(job)["JobState"] == "FAILED", output.read_text()
    assert slurm.left() == []


@pytest.mark.parametrize("script", JOBS)
def test_what_each_rank_is_told(script, slurm):
    """Each of two ranks on each of two nodes gets its place, and a flag with a space."""
    job, output = submit(slurm, script, LIGHT, "--flag", "a folder/c.pt")
    shown = slurm.wait(job)
    text = output.read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), text
    flags = ", flags ['--flag', 'a folder/c.pt']"
    ranks = sorted(re.findall("^rank .*", text, re.M))
    assert ranks == [place + flags for place in PLACES], text
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
def test_a_point_to_point_lesson(script, slurm):
    """Ranks of two nodes send numbers to each other, and the lesson gets its own flags."""
    flags = ("--device", "cpu", "--deadlock", *PATIENT)
    job, output = submit_one_each(slurm, script, "playground/blocking_p2p.py", *flags)
    assert slurm.wait(job)["JobState"] == "COMPLETED", output.read_text()
    assert "rank 1: even ranks send first: received 0" in output.read_text()
    assert slurm.left() == []


@pytest.mark.parametrize("script", JOBS)
def test_lessons_for_other_launchers(script, slurm, tmp_path):
    """A lesson that starts its ranks, a copy of it and a single process are refused in one line."""
    copy = tmp_path / "broken.py"
    copy.write_text((ROOT / SPAWNING).read_text())
    for lesson, words in (
        (SPAWNING, 'starts its own processes: HOSTS="node0 node1" run/two_nodes_ssh.sh'),
        (copy, "starts its own processes: "),
        ("playground/single_gpu.py", "is a single process: python playground/single_gpu.py"),
    ):
        job, output = submit(slurm, script, lesson)
        assert slurm.wait(job)["ExitCode"] == "2:0"
        assert output.read_text().startswith(f"error: {lesson} {words}")
        assert len(output.read_text().splitlines()) == 1


@pytest.mark.parametrize("script", JOBS)
def test_scancel(script, slurm):
    """scancel ends all ranks on both nodes."""
    job, output = submit(slurm, script, LIGHT, "--wait")
    wait_for(output, r"^rank \d waits$", 4)
    assert slurm.command("scancel", job).returncode == 0
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    assert slurm.left() == []


def test_a_wrong_flag(slurm):
    """The job is FAILED, and the output has the lesson's own line."""
    flags = ("--batch_size", 121, "--device", "cpu")
    job, output = submit_one_each(slurm, JOBS[0], LESSON, *flags)
    assert slurm.wait(job)["JobState"] == "FAILED"
    assert "2 ranks cannot divide --batch_size 121: use 120" in output.read_text()


@pytest.mark.parametrize("script", JOBS)
def test_what_is_missing_is_one_line(script, slurm):
    """A job without sbatch, in another folder, without a lesson or without Python ends at once."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(["bash", ROOT / script], env=alone, capture_output=True, text=True)
    assert done.returncode == 1
    outside = r"error: this is not inside a Slurm job: sbatch .+ playground/\S+\n"
    assert re.fullmatch(outside, done.stderr)
    elsewhere = r"error: \S+ is not the checkout: cd .*sbatch.*\n"
    without = rf"error: no lesson: sbatch {script} playground/\S+\n"
    for words, cwd, status, pattern in (
        ([ROOT / script, LESSON], slurm.folder, 1, elsewhere),
        ([script], ROOT, 2, without),
    ):
        job, output = submit(slurm, *words, cwd=cwd)
        assert slurm.wait(job)["ExitCode"] == f"{status}:0"
        assert re.fullmatch(pattern, output.read_text())
    job, output = submit(slurm, "--export=ALL,PYTHON=/no/python", script, LESSON)
    assert slurm.wait(job)["JobState"] == "FAILED"
    assert "error: /no/python is missing: run/setup.sh" in output.read_text()
