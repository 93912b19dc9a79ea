"""The benchmarks: they run, and tell what fails or is missing. No time is judged here; memory is."""

import importlib.util
import re
import signal
import sys
import time

import pytest
from conftest import ROOT, Job, run

AGAINST_OTHERS = ROOT / "tests" / "bench_against_others.py"
QUICK = ("--dataset", "digits", "--epochs", 1, "--repeats", 1)
MEASURED = [r"[\d,]+", r"\d+\.\d\d", r"\d+\.\d\d%"]  # images/s, seconds, test accuracy


def table(text):
    """Return the rows of a Markdown table, without its head: a list of each row's cells, by the first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:2] == "| "]
    return {name: cells for name, *cells in rows[1:]}


def stand_in(folder, code):
    """Write a package named accelerate that runs this code, and return the environment in which it is found first."""
    (folder / "accelerate.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def test_each_program_has_a_row_and_failures_say_why(tmp_path):
    """A program that fails is told in its row, by its error and not by torchrun's summary; the others are measured."""
    broken = stand_in(tmp_path, "raise RuntimeError('broken | on purpose')")
    processes = {"single_gpu": "1", "ddp": "2", "torchvision": "1", "accelerate_2": "2"}
    done = run(AGAINST_OTHERS, *QUICK, "--only", *processes, env=broken, status=1)
    rows = table(done.stdout)
    assert {name: cells[0] for name, cells in rows.items()} == processes
    assert rows.pop("accelerate_2") == ["2", r"failed: RuntimeError: broken \| on purpose", "-", "-"]
    for cells in rows.values():
        assert all(re.fullmatch(*pair) for pair in zip(MEASURED, cells[1:], strict=True)), rows
    assert rows["single_gpu"][3] == rows["ddp"][3]  # the same training
    assert re.search(r"^The test accuracies (do NOT )?agree within 1 point: ", done.stdout, re.M)


def test_accelerate_is_optional():
    """Where accelerate is missing its row says how to install it; elsewhere it is measured."""
    rows = table(run(AGAINST_OTHERS, *QUICK, "--only", "accelerate").stdout)
    if importlib.util.find_spec("accelerate") is None:
        assert rows == {"accelerate": ["1", "not installed: pip install accelerate", "-", "-"]}
    else:
        assert all(re.fullmatch(*pair) for pair in zip(MEASURED, rows["accelerate"][1:], strict=True)), rows


def test_interrupt_ends_all_processes(tmp_path):
    """Ctrl-C ends torchrun and its workers, prints what there is, and the exit status is 130."""
    slow = stand_in(tmp_path, "import time; time.sleep(60)")
    job = Job(sys.executable, AGAINST_OTHERS, *QUICK, "--only", "accelerate_2", env=slow)
    end = time.monotonic() + 60
    while len(job.pids()) < 4 and time.monotonic() < end:  # the benchmark, torchrun and two workers
        time.sleep(0.1)
    job.process.send_signal(signal.SIGINT)
    done = job.wait()  # fails if a process is left
    assert done.returncode == 130, done.stderr
    assert table(done.stdout) == {"accelerate_2": ["2", "not measured", "-", "-"]}
    assert done.stderr.endswith("interrupted\n")


def test_loader_takes_little_memory(mnist):
    """load() and a pass over the DataLoader need at most 1.5 times the memory of MNIST's images in float32."""
    done = run(ROOT / "tests" / "benchmark.py", "--data_dir", mnist, "--only", "loader_memory", "--repeats", 1)
    _, _, ratio, _, met = table(done.stdout)["loader_memory"]
    assert float(ratio) == pytest.approx(1.25, abs=0.25) and met == "met"
