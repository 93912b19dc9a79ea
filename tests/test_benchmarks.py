"""The benchmarks run. No time is checked here, but the loader's memory is."""

import signal
import sys
import time

import pytest
from benchmark import BARE, COMPARED
from conftest import DIGITS, ROOT, Job, epochs, run, torchrun, train

AGAINST_OTHERS = ROOT / "tests" / "bench_against_others.py"
QUICK = ("--dataset", "digits", "--epochs", 1, "--repeats", 1)


def table(text):
    """Return the rows of a Markdown table: for each first cell, the others."""
    rows = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows[name] = cells
    return rows


@pytest.mark.parametrize("kind", COMPARED)
def test_a_bare_program_prints_the_numbers_of_its_lesson(kind):
    """A lesson and its bare program print the same losses and accuracies on the digits."""
    lesson, *flags = COMPARED[kind].removeprefix("torchrun ").split()
    flags += [*DIGITS, "--batch_size", 120, "--epochs", 2]
    bare_flags = (kind, "digits", "data", 120, 2)
    if "torchrun" in COMPARED[kind]:
        done = torchrun(BARE, *bare_flags).wait()
        expected = train(lesson, *flags, processes=2)
    else:
        done = run(BARE, *bare_flags, "cpu")
        expected = run(lesson, *flags)
    assert len(epochs(done.stdout)) == 2, done.stderr
    assert epochs(done.stdout) == epochs(expected.stdout)


def test_each_program_has_a_row():
    """The lessons' two and torchvision's arrive at about the same accuracy."""
    processes = {"single_gpu": "1", "ddp": "2", "torchvision": "1"}
    rows = table(run(AGAINST_OTHERS, *QUICK, "--only", *processes).stdout)
    assert {name: rows[name][0] for name in processes} == processes
    assert rows["single_gpu"][3] == rows["ddp"][3]  # the same training


def test_interrupt_ends_all_processes(tmp_path):
    """Ctrl-C ends torchrun and its ranks."""
    (tmp_path / "accelerate.py").write_text("import time; time.sleep(600)")
    slow = {"PYTHONPATH": str(tmp_path)}  # found before the real one
    job = Job(sys.executable, AGAINST_OTHERS, *QUICK, "--only", "accelerate_2", env=slow)
    end = time.monotonic() + 300
    while len(job.pids()) < 4 and time.monotonic() < end:  # benchmark, torchrun, two ranks
        time.sleep(0.1)
    job.process.send_signal(signal.SIGINT)
    assert job.wait().returncode == -signal.SIGINT  # wait() fails if a process is left


def test_loader_takes_little_memory(mnist):
    """load() and a pass over the DataLoader need at most 1.5 times the memory of MNIST's images."""
    flags = ("--data_dir", mnist, "--only", "loader_memory", "--repeats", 1)
    done = run(ROOT / "tests" / "benchmark.py", *flags)
    *_, ratio, target, met = table(done.stdout)["loader_memory"]
    assert float(ratio) == pytest.approx(1.25, abs=0.25)
    assert (target, met) == ("at most 1.5", "met")
