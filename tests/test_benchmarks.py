"""The benchmarks run, and they report what fails or is missing.

No time is checked here, but the loader's memory is.
"""

import importlib.util
import re
import signal
import sys
import time

import pytest
from benchmark import COMPARED
from conftest import DIGITS, ROOT, Job, epochs, run, torchrun

BARE = ROOT / "tests" / "bare.py"
AGAINST_OTHERS = ROOT / "tests" / "bench_against_others.py"
QUICK = ("--dataset", "digits", "--epochs", 1, "--repeats", 1)
MEASURED = [r"[\d,]+", r"\d+\.\d\d", r"\d+\.\d\d%"]  # images/s, seconds, test accuracy


def table(text):
    """Return the rows of a Markdown table, without its head.

    Each is a list of its cells, by its first cell.
    """
    rows = {}
    for line in text.splitlines():
        if line.startswith("| "):
            name, *cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows[name] = cells
    rows.pop(next(iter(rows)))  # the head
    return rows


def stand_in(folder, code):
    """Write a package named accelerate that runs this code.

    Returns the environment in which Python finds it before the real one.
    """
    (folder / "accelerate.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def measured(cells):
    """Whether these are the cells of a program that was measured."""
    return all(re.fullmatch(*pair) for pair in zip(MEASURED, cells[1:], strict=True))


@pytest.mark.parametrize("kind", COMPARED)
def test_a_bare_program_prints_the_numbers_of_its_lesson(kind):
    """A lesson and its bare program print the same losses and accuracies on the digits."""
    lesson = COMPARED[kind].lesson
    processes = COMPARED[kind].ranks
    flags = (*DIGITS, "--batch_size", 120, "--epochs", 2, *COMPARED[kind].flags)
    bare_flags = (kind, "digits", "data", 120, 2)
    if processes:
        ends = [
            torchrun(lesson, *flags, processes=processes).wait(),
            torchrun(BARE, *bare_flags, processes=processes).wait(),
        ]
    else:
        ends = [run(lesson, *flags), run(BARE, *bare_flags)]
    numbers = [epochs(end.stdout) for end in ends]
    assert len(numbers[0]) == 2, ends[0].stderr
    assert numbers[0] == numbers[1], ends[1].stderr
    loss = 1.3477 if kind == "transformer" else 1.4064
    assert numbers[0][-1]["loss"] == pytest.approx(loss, abs=2e-4)


def test_each_program_has_a_row_and_failures_say_why(tmp_path):
    """A program that fails has a row with its error, not torchrun's summary.

    The other programs are measured.
    """
    broken = stand_in(tmp_path, "raise RuntimeError('broken | on purpose')")
    processes = {"single_gpu": "1", "ddp": "2", "torchvision": "1", "accelerate_2": "2"}
    done = run(AGAINST_OTHERS, *QUICK, "--only", *processes, env=broken, status=1)
    rows = table(done.stdout)
    assert {name: cells[0] for name, cells in rows.items()} == processes
    assert rows.pop("accelerate_2") == [
        "2",
        r"failed: RuntimeError: broken \| on purpose",
        "-",
        "-",
    ]
    for cells in rows.values():
        assert measured(cells), rows
    assert rows["single_gpu"][3] == rows["ddp"][3]  # the same training
    assert re.search(r"^The test accuracies (do NOT )?agree within 1 point: ", done.stdout, re.M)


def test_accelerate_is_optional():
    """If accelerate is missing, its row says how to install it. Otherwise it is measured."""
    rows = table(run(AGAINST_OTHERS, *QUICK, "--only", "accelerate").stdout)
    if importlib.util.find_spec("accelerate") is None:
        assert rows == {"accelerate": ["1", "not installed: pip install accelerate", "-", "-"]}
    else:
        assert measured(rows["accelerate"]), rows


def test_interrupt_ends_all_processes(tmp_path):
    """Ctrl-C ends torchrun and its ranks. What was measured is printed, and the status is 130."""
    slow = stand_in(tmp_path, "import time; time.sleep(600)")
    job = Job(sys.executable, AGAINST_OTHERS, *QUICK, "--only", "accelerate_2", env=slow)
    end = time.monotonic() + 300
    while len(job.pids()) < 4 and time.monotonic() < end:  # benchmark, torchrun, two ranks
        time.sleep(0.1)
    job.process.send_signal(signal.SIGINT)
    done = job.wait()  # fails if a process is left
    assert done.returncode == 130, done.stderr
    assert table(done.stdout) == {"accelerate_2": ["2", "not measured", "-", "-"]}
    assert done.stderr.endswith("interrupted\n")


def test_loader_takes_little_memory(mnist):
    """load() and a pass over the DataLoader need at most 1.5 times the memory of MNIST's images.

    The images are float32.
    """
    flags = ("--data_dir", mnist, "--only", "loader_memory", "--repeats", 1)
    done = run(ROOT / "tests" / "benchmark.py", *flags)
    _, _, ratio, _, met = table(done.stdout)["loader_memory"]
    assert float(ratio) == pytest.approx(1.25, abs=0.25) and met == "met"
