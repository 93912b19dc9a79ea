"""The benchmarks run. No time is checked here, but the loader's memory is."""

import benchmark
import pytest
from benchmark import COMMANDS, PROGRAMS
from conftest import ROOT, SHORT, epochs, ranks, run, train


@pytest.mark.parametrize("kind", [kind for kind in COMMANDS if "bare" in COMMANDS[kind]])
def test_a_bare_program_prints_the_numbers_of_its_lesson(kind):
    """A lesson and its bare program print the same losses and accuracies on little data."""
    words = COMMANDS[kind].partition(";")[0].split()
    processes = {"torchrun": 2, "torchrun1": 1}.get(words[0])  # None: without a launcher
    lesson, *flags = words[1:] if processes else words
    data = "text" if kind == "language" else "digits"
    few = {"DOCUMENTS": "40"}  # of the text
    flags += [*SHORT, "--dataset", data]
    expected = train(lesson, *flags, processes=processes, env=few)
    bare = (kind, data, "data", 120, 1)
    jobs = ranks(PROGRAMS["bare"], *bare, processes=processes or 1, env=few)
    done, *_ = [job.wait() for job in jobs]
    assert len(epochs(done.stdout)) == 1, done.stderr
    assert epochs(done.stdout) == epochs(expected.stdout)


def row_of(name, text):
    """Return the cells of a row of a Markdown table, without the first one, which is its name."""
    [line] = [line for line in text.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.strip("|").split(" | ")][1:]


EPOCH = "print('epoch {}  loss 1.0000  train 90.00%  test 91.00%  0.10 s  {} images/s')"


def test_a_row_of_two_commands(monkeypatch, tmp_path):
    """The medians of what both print, but for the first epoch, the ratio and the target."""
    for name, speeds in (("bare", (1, 2_000, 4_000)), ("single_gpu", (1, 1_000, 2_000))):
        lines = [EPOCH.format(epoch, f"{speed:,}") for epoch, speed in enumerate(speeds)]
        path = tmp_path / f"{name}.py"
        path.write_text("\n".join(lines))
        monkeypatch.setitem(PROGRAMS, name, path)
    epoch, whole = benchmark.two_commands("single_gpu", "data", 2)
    assert epoch[1:] == ["39.936 s", "19.968 s", "2", "at most 1.15", "missed"]
    assert whole[0].startswith("command to exit: single_gpu; bare")


def test_loader_takes_little_memory(mnist):
    """load() and a pass over the DataLoader need at most 1.5 times the memory of MNIST's images."""
    flags = ("--data_dir", mnist, "--only", "loader_memory", "--repeats", 1)
    done = run(ROOT / "tests" / "benchmark.py", *flags)
    *_, ratio, target, met = row_of("loader_memory", done.stdout)
    assert float(ratio) == pytest.approx(1.25, abs=0.25)
    assert (target, met) == ("at most 1.5", "met")
