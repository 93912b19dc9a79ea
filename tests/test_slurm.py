"""The Slurm templates in run/, submitted to a real Slurm cluster of two nodes."""

import os
import re
import signal
import subprocess
import time

import pytest
from conftest import PLACE, PLACES, ROOT, SHORT, epochs, one_process
from nodes import HOSTS, Nodes
from slurm import Slurm

TEMPLATES = ["run/slurm_srun.sbatch", "run/slurm_torchrun.sbatch"]
LESSON = "playground/distributed_data_parallel_torchrun.py"
SPAWNING = "playground/distributed_data_parallel.py"
LONG = (*SHORT[:-1], 100_000)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster for all tests of this file."""
    with Nodes() as nodes, Slurm(nodes, tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def submit(slurm, *words, cwd=ROOT):
    """Submit a job whose output is in the cluster's folder. Returns its id and where its output will be."""
    job = slurm.submit("--output", slurm.folder / "%j.out", *words, cwd=cwd)
    return job, slurm.folder / f"{job}.out"


def wait_for(output, pattern, seconds=180):
    """Wait until a file has a line that matches. Returns all matches."""
    end = time.monotonic() + seconds
    while not (output.exists() and (found := re.findall(pattern, output.read_text(), re.M))):
        assert time.monotonic() < end, output.read_text()
        time.sleep(0.1)
    return found


@pytest.mark.parametrize("template", TEMPLATES)
def test_two_nodes(template, slurm, tmp_path):
    """Two nodes with two ranks each print single_gpu.py's numbers, and a flag with a space survives; nothing stays."""
    checkpoint = tmp_path / "a folder" / "c.pt"
    job, output = submit(slurm, template, LESSON, *SHORT, "-s", checkpoint)
    shown = slurm.wait(job)
    text = output.read_text()
    assert (shown["JobState"], shown["ExitCode"]) == ("COMPLETED", "0:0"), text
    assert checkpoint.exists()
    table = re.findall(r"^(\d) +(\d) +(\d) +cpu +\d+ +(\S+)$", text, re.M)
    places = [("0", "0", "0"), ("0", "1", "1"), ("1", "2", "0"), ("1", "3", "1")]
    assert table == [(*place, host) for place, host in zip(places, sorted(HOSTS * 2), strict=True)], text
    assert epochs(text) == one_process(*SHORT)
    assert slurm.left() == []


def test_what_srun_tells_each_rank(slurm, tmp_path):
    """All that a launcher says of a rank's place, as torchrun would."""
    script = tmp_path / "place.py"
    script.write_text(PLACE)
    job, output = submit(slurm, TEMPLATES[0], script)
    assert slurm.wait(job)["JobState"] == "COMPLETED"
    assert sorted(re.findall(r"rank \d of \d, on its node \d of \d, node \d", output.read_text())) == PLACES


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
    job, output = submit(slurm, template, "playground/blocking_p2p.py", "--device", "cpu", "--deadlock")
    assert slurm.wait(job)["JobState"] == "COMPLETED", output.read_text()
    assert "rank 3: batch_isend_irecv: received 2" in output.read_text()
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
def test_a_killed_rank_ends_the_job(template, slurm):
    """SIGKILL to a rank on the second node: the job is FAILED, and nothing is left on either node."""
    job, output = submit(slurm, template, LESSON, *LONG)
    wait_for(output, r"^epoch ")  # all are connected
    os.kill(int(wait_for(output, rf"(\d+) +{HOSTS[1]}$")[-1]), signal.SIGKILL)
    shown = slurm.wait(job)
    assert shown["JobState"] == "FAILED", output.read_text()
    assert slurm.left() == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_scancel(template, slurm):
    """scancel ends all ranks on both nodes."""
    job, output = submit(slurm, template, LESSON, *LONG)
    wait_for(output, r"^epoch ")
    assert slurm.command("scancel", job).returncode == 0
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    assert slurm.left() == []


def test_a_wrong_flag(slurm):
    """The job is FAILED, and the lesson's own line is in the output."""
    job, output = submit(slurm, TEMPLATES[0], LESSON, "--batch_size", 121, "--device", "cpu")
    assert slurm.wait(job)["JobState"] == "FAILED"
    assert "can't be shared by 4 processes: use 120" in output.read_text()


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_missing_is_one_line(template, slurm):
    """Not submitted, submitted from another folder, no lesson, no Python."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(["bash", ROOT / template], env=alone, capture_output=True, text=True, timeout=300)
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
