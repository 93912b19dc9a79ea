"""The Slurm templates in run/, submitted to a real Slurm cluster of two nodes."""

import os
import re
import signal
import subprocess

import pytest
from conftest import LONG, ROOT, SHORT, epochs, one_process
from nodes import LIGHT, PATIENT, PLACES, Nodes
from slurm import Slurm, wait_for

TEMPLATES = ["run/slurm_srun.sbatch", "run/slurm_torchrun.sbatch"]
LESSON = "playground/distributed_data_parallel_torchrun.py"
SPAWNING = "playground/distributed_data_parallel.py"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster for all tests of this file."""
    with Nodes() as nodes, Slurm(nodes, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def submit(slurm, *words, cwd=ROOT, **env):
    """Submit a job whose output is in the cluster's folder. Returns its id and where its output will be."""
    job = slurm.submit("--output", slurm.folder / "%j.out", *words, cwd=cwd, env=env)
    return job, slurm.folder / f"{job}.out"


def submit_one_each(slurm, *words):
    """Submit a job with one rank on each node, in either template's way."""
    return submit(slurm, "--ntasks-per-node", 1, *words, GPUS="1")


@pytest.mark.parametrize("template", TEMPLATES)
def test_training_until_a_rank_is_killed(template, slurm, tmp_path):
    """A rank on each node: single_gpu.py's numbers. SIGKILL to the second: the job is FAILED, and nothing is left."""
    checkpoint = tmp_path / "a folder" / "c.pt"
    job, output = submit_one_each(slurm, template, LESSON, *SHORT[:-1], LONG[-1], *PATIENT, "-s", checkpoint)
    text = wait_for(output, r"^epoch 2/")
    assert checkpoint.exists()
    table = re.findall(r"^(\d) +(\d) +(\d) +cpu +(\d+) +(\S+)$", text, re.M)
    assert [(*row[:3], row[4]) for row in table] == [("0", "0", "0", "node0"), ("1", "1", "0", "node1")], text
    assert epochs(text)[:1] == one_process(*SHORT)
    os.kill(int(table[1][3]), signal.SIGKILL)
    assert slurm.wait(job)["JobState"] == "FAILED", output.read_text()
    assert slurm.left() == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_each_rank_is_told(template, slurm):
    """All that a launcher says of a rank's place, two on each node, and a flag with a space; nothing stays."""
    job, output = submit(slurm, template, LIGHT, "--flag", "a folder/c.pt")
    shown = slurm.wait(job)
    text = output.read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), text
    flags = ", flags ['--flag', 'a folder/c.pt']"
    assert sorted(re.findall("^rank .*", text, re.M)) == [place + flags for place in PLACES], text
    assert slurm.left() == []


def test_the_threads_of_each_process(slurm, tmp_path):
    """As many as the task has cores, unless OMP_NUM_THREADS says otherwise."""
    script = tmp_path / "threads.py"
    script.write_text('import os\nprint(os.environ["RANK"] and "threads", os.environ["OMP_NUM_THREADS"])\n')
    for export, threads in (("PATH,SLURM_CONF", "2"), ("PATH,SLURM_CONF,OMP_NUM_THREADS=7", "7")):
        flags = ("--export", export, "--ntasks-per-node", 1, "--cpus-per-task", 2)
        job, output = submit(slurm, *flags, TEMPLATES[0], script)
        assert slurm.wait(job)["JobState"] == "COMPLETED"
        assert re.findall(r"^threads (\d)$", output.read_text(), re.M) == [threads] * 2, output.read_text()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_point_to_point_lesson(template, slurm):
    """Ranks of two nodes send each other numbers; flags of the lesson's own are passed on."""
    flags = ("--device", "cpu", "--deadlock", *PATIENT)
    job, output = submit_one_each(slurm, template, "playground/blocking_p2p.py", *flags)
    assert slurm.wait(job)["JobState"] == "COMPLETED", output.read_text()
    assert "rank 1: batch_isend_irecv: received 0" in output.read_text()
    assert slurm.left() == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_lessons_for_other_launchers(template, slurm, tmp_path):
    """One that spawns its ranks and one that is a single process are refused in a line, as are copies of them."""
    copy = tmp_path / "broken.py"
    copy.write_text((ROOT / SPAWNING).read_text())
    for lesson, words in (
        (SPAWNING, 'starts its own processes: HOSTS="node0 node1" run/two_nodes_ssh.sh'),
        (copy, "starts its own processes: "),
        ("playground/single_gpu.py", "is a single process: python playground/single_gpu.py"),
    ):
        job, output = submit(slurm, template, lesson)
        assert slurm.wait(job)["ExitCode"] == "2:0"
        assert output.read_text().startswith(f"error: {lesson} {words}")
        assert len(output.read_text().splitlines()) == 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_scancel(template, slurm):
    """scancel ends all ranks on both nodes."""
    job, output = submit(slurm, template, LIGHT, "--wait")
    wait_for(output, r"^rank \d waits$", 4)
    assert slurm.command("scancel", job).returncode == 0
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    assert slurm.left() == []


def test_a_wrong_flag(slurm):
    """The job is FAILED, and the lesson's own line is in the output."""
    job, output = submit_one_each(slurm, TEMPLATES[0], LESSON, "--batch_size", 121, "--device", "cpu")
    assert slurm.wait(job)["JobState"] == "FAILED"
    assert "can't be shared by 2 processes: use 120" in output.read_text()


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_missing_is_one_line(template, slurm):
    """Not submitted, submitted from another folder, no lesson, no Python."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(["bash", ROOT / template], env=alone, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.fullmatch(r"error: not in a Slurm job: sbatch .+ playground/\S+\n", done.stderr)
    for words, cwd, status, pattern in (
        ([ROOT / template, LESSON], slurm.folder, 1, r"error: \S+ is not the checkout: cd .*sbatch.*\n"),
        ([template], ROOT, 2, rf"error: no lesson: sbatch {template} playground/\S+\n"),
    ):
        job, output = submit(slurm, *words, cwd=cwd)
        assert slurm.wait(job)["ExitCode"] == f"{status}:0"
        assert re.fullmatch(pattern, output.read_text())
    job, output = submit(slurm, "--export=ALL,PYTHON=/no/python", template, LESSON)
    assert slurm.wait(job)["JobState"] == "FAILED"
    assert "error: /no/python is missing: run/setup.sh" in output.read_text()
