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
LESSON = "playground/distributed_data_parallel.py"
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


def wait_for(output, pattern, seconds=60):
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


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_killed_rank_ends_the_job(template, slurm):
    """SIGKILL to a rank on the second node: the job is FAILED, and nothing is left on either node."""
    job, output = submit(slurm, template, LESSON, *LONG)
    wait_for(output, r"^epoch ")  # all are connected
    os.kill(int(wait_for(output, rf"(\d+) +{HOSTS[1]}$")[-1]), signal.SIGKILL)
    shown = slurm.wait(job, 40)
    assert shown["JobState"] == "FAILED", output.read_text()
    assert slurm.left() == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_scancel(template, slurm):
    """scancel ends all ranks on both nodes."""
    job, output = submit(slurm, template, LESSON, *LONG)
    wait_for(output, r"^epoch ")
    assert slurm.command("scancel", job).returncode == 0
    assert slurm.wait(job, 40)["JobState"] == "CANCELLED"
    assert slurm.left() == []


def test_a_wrong_flag(slurm):
    """The job is FAILED, and the lesson's own line is in the output."""
    job, output = submit(slurm, TEMPLATES[0], LESSON, "--batch_size", 121, "--device", "cpu")
    assert slurm.wait(job)["JobState"] == "FAILED"
    assert "use --batch_size 120" in output.read_text()


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_is_missing_is_one_line(template, slurm):
    """Not submitted, submitted from another folder, no lesson, no Python."""
    alone = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(["bash", ROOT / template], env=alone, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert re.fullmatch(r"error: not inside a Slurm job: sbatch .+ playground/\S+\n", done.stderr)
    for words, cwd, status, pattern in (
        ([ROOT / template, LESSON], slurm.folder, 1, r"error: \S+ is not the checkout: cd .*sbatch.*\n"),
        ([template], ROOT, 2, rf"error: no lesson: sbatch {template} playground/\S+\n"),
    ):
        job, output = submit(slurm, *words, cwd=cwd)
        assert slurm.wait(job, 20)["ExitCode"] == f"{status}:0"
        assert re.fullmatch(pattern, output.read_text())
    job, output = submit(slurm, "--export=ALL,PYTHON=/no/python", template, LESSON)
    assert slurm.wait(job, 20)["JobState"] == "FAILED"
    assert "error: /no/python is missing: run/setup.sh" in output.read_text()
