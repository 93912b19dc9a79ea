"""The lesson with detectron2's helpers: nodes, checkpoints, a seed for all ranks, errors."""

import os
import re

import torch
from conftest import DIGITS, SHORT, Lesson, epochs, free_port, lesson_path, one_process, run
from nodes import small_disk

from common.models import MLP

LESSON = "distributed_data_parallel2"
SEED = "    torch.manual_seed(args.seed)\n"


def changed(line, folder):
    """Return a copy of the lesson with a line after the seed is set."""
    text = lesson_path(LESSON).read_text()
    assert text.count(SEED) == 1
    copy = folder / f"{LESSON}.py"
    copy.write_text(text.replace(SEED, SEED + line))
    return copy


def test_a_random_seed_for_all_ranks(tmp_path):
    """The ranks have the same seed, and the next run has a different one."""
    copy = changed('    print(f"seed {args.seed}", flush=True)\n', tmp_path)
    # detectron2 draws from numpy's generator, which forked runs would otherwise share.
    copy.write_text(f"import numpy\nnumpy.random.seed()\n{copy.read_text()}")
    first = run(copy, *SHORT, "-g", 2, "--random_seed").stdout
    second = run(copy, *SHORT, "-g", 1, "--random_seed").stdout
    assert len(epochs(first)) == len(epochs(second)) == 1
    zero, one = re.findall(r"seed (\d+)", first)
    (other,) = re.findall(r"seed (\d+)", second)
    assert zero == one != other


def test_a_mistake_in_a_single_process(tmp_path):
    """launch then calls train() in the process of main(): one traceback, and nothing added."""
    copy = changed('    assert rank == 5, "my own mistake"\n', tmp_path)
    done = run(copy, *SHORT, "-g", 1, status=1)
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.splitlines()[-1] == "AssertionError: my own mistake"


def test_the_number_of_the_node():
    """-r is -nr. Two nodes, here one machine, meet at --port and compute what one process does."""
    flags = (*SHORT, "-n", 2, "-g", 1, "-ip", "127.0.0.1", "--port", free_port())
    jobs = [Lesson(LESSON, *flags, "-r", node) for node in (0, 1)]
    first, second = [job.wait() for job in jobs]
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert re.findall(r"^(\d) +(\d) +\d +cpu ", first.stdout, re.M) == [("0", "0"), ("1", "1")]
    assert epochs(first.stdout) == one_process(*SHORT)
    assert second.stdout == ""


def test_a_checkpoint_after_each_epoch(tmp_path):
    """It has the keys of the plain model. If the disk is full, the one before stays whole."""
    folder = tmp_path / "small"
    folder.mkdir()
    path = folder / "c.pt"
    with small_disk(folder, "1000k"):  # has room for one
        done = run(LESSON, *DIGITS, "-g", 2, "--epochs", 2, "-s", path, status=1)
        assert len(epochs(done.stdout)) == 2
        assert "No space left on device" in done.stderr
        assert os.listdir(folder) == ["c.pt"]
        state = torch.load(path, weights_only=True)
    assert state.keys() == {"model", "optimizer", "epoch", "args"}
    assert state["epoch"] == 1
    model = MLP()
    model.load_state_dict(state["model"])
    torch.optim.Adam(model.parameters()).load_state_dict(state["optimizer"])
