"""The lesson with detectron2's helpers: a seed for all ranks, checkpoints, a full disk.

test_rendezvous.py has two nodes.
"""

import os
import re

import torch
from launch import DIGITS, SHORT, epochs, run
from nodes import small_disk

from common.models import MLP

LESSON = "distributed_data_parallel2"


def test_a_random_seed_for_all_ranks(change):
    """The ranks have the same seed, and the next run has a different one."""
    line = "    torch.manual_seed(args.seed"
    copy = change(LESSON, (line, f'    print("seed", args.seed, flush=True)\n{line}'))
    # detectron2 draws from numpy's generator, which forked runs would otherwise share.
    copy.write_text(f"import numpy\nnumpy.random.seed()\n{copy.read_text()}")
    first = run(copy, *SHORT, "-g", 2, "--random_seed").stdout
    second = run(copy, *SHORT, "-g", 1, "--random_seed").stdout
    assert len(epochs(first)) == len(epochs(second)) == 1
    zero, one = re.findall(r"seed (\d+)", first)
    (other,) = re.findall(r"seed (\d+)", second)
    assert zero == one != other


def test_a_checkpoint_after_each_epoch(tmp_path):
    """It has the keys of the plain model. If the disk is full, the one before stays whole."""
    path = tmp_path / "c.pt"
    with small_disk(tmp_path, "1000k"):  # has room for one
        done = run(LESSON, *DIGITS, "-g", 2, "--epochs", 2, "-s", path, status=1)
        assert len(epochs(done.stdout)) == 2
        assert "No space left on device" in done.stderr
        assert os.listdir(tmp_path) == ["c.pt"]
        state = torch.load(path, weights_only=True)
    assert state.keys() == {"model", "optimizer", "epoch", "args"}
    assert state["epoch"] == 1
    model = MLP()
    model.load_state_dict(state["model"])
    torch.optim.Adam(model.parameters()).load_state_dict(state["optimizer"])
