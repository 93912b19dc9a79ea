"""The hybrid lesson: clipping, and a rank that does nothing. test_watch.py has its messages."""

import re
import textwrap

import pytest
from launch import DIGITS, losses, ranks, run, single_gpu
from lessons import ROOT

LESSON = "hybrid_parallel"
ONE_EPOCH = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--double")
CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)\n"
STEP = "            optimizer.step()\n"


def test_clipping_with_some_layers_replicated_along_tp(change):
    """The cure in answers.md: the numbers are those of one process that clips.

    The convolutions and the last of three linear layers, which has no partner, are replicated.
    """
    answers = (ROOT / "playground" / "pages" / "answers.md").read_text()
    [cure] = re.findall(r"^( {7}def to_dtensor.*?\n)\n\d\. ", answers, re.M | re.S)
    cure = textwrap.indent(textwrap.dedent(cure), "    ")
    plan = "    parallelize_module(model, mesh, plan)\n"
    imported = "from torch.distributed.tensor.parallel import"
    more = "from torch.distributed.tensor import DTensor, Replicate, distribute_module\n"
    pairs = [(STEP, CLIP + STEP), (plan, plan + cure), (imported, more + imported)]
    flags = (*ONE_EPOCH, "--model", "cnn", "--layers", 2)
    [found] = losses(run(change(LESSON, *pairs), *flags, "--mesh", "1x2", processes=2).stdout)
    [expected] = losses(run(change("single_gpu", (STEP, CLIP + STEP)), *flags).stdout)
    assert found == pytest.approx(expected, abs=1e-10)
    assert abs(found - single_gpu(*flags)[0]["loss"]) > 1e-3


def test_a_rank_that_does_nothing(change):
    """--timeout holds for the groups of both axes, too, whose own default is half an hour."""
    line = "    train_loader.sampler.set_epoch(epoch)"
    copy = change(LESSON, (line, f"    time.sleep(9999 * (rank == 3))\n{line}"))
    jobs = ranks(copy, *ONE_EPOCH, "--timeout", 5, processes=4)
    try:
        ends = [job.wait(200) for job in jobs[:3]]
    finally:
        for job in jobs:
            job.kill()
    assert [end.returncode for end in ends] == [1, 1, 1]
    assert any("Timed out" in end.stderr for end in ends)
