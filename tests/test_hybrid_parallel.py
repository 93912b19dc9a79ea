"""The hybrid lesson: the numbers of one process on a mesh, what a rank keeps, and its messages."""

import re
import textwrap
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, ROOT, lesson_path, losses, ranks, run, single_gpu, train
from forked import in_group

from common.models import MLP
from figures.messages import Messages

LESSON = "hybrid_parallel"
ONE_EPOCH = (*DIGITS, "--batch_size", 120, "--epochs", 1, "--double")
KEPT = r"^(rank \d  .*)  keeps ([\d,]+) parameters$"


@pytest.mark.parametrize(
    ("kind", "names", "keeps"),
    [("tp", ("dp", "tp"), 14_821), ("hsdp", ("replicate", "shard"), 29_605)],
)
def test_four_ranks(kind, names, keeps):
    """The loss of single_gpu.py. The ranks of a row follow each other; each keeps so much."""
    done = train(LESSON, *ONE_EPOCH, "--kind", kind, processes=4)
    assert not done.stderr
    [right] = single_gpu(*ONE_EPOCH)
    assert losses(done.stdout) == pytest.approx([right["loss"]], abs=1e-10)
    places = []
    for rank in range(4):
        places.append(f"rank {rank}  {names[0]} {rank // 2}  {names[1]} {rank % 2}")
    assert re.findall(KEPT, done.stdout, re.M) == [(place, f"{keeps:,}") for place in places]
    assert f"{keeps:,}" in lesson_path(LESSON).read_text().split('"""')[1]


MESSAGES = {  # of a step along each axis; the MLP has two pairs and four layers
    ("dp", "tp"): {
        ("tp", "all_reduce"): 3,  # the first pair has images as input
        ("dp", "all_gather"): 8,
        ("dp", "reduce_scatter"): 4,
    },
    ("replicate", "shard"): {
        ("shard", "all_gather"): 8,
        ("shard", "reduce_scatter"): 4,
        ("replicate", "all_reduce"): 4,
    },
}


def count_messages(rank):
    """Count the messages of a step along each axis of two meshes."""
    import hybrid_parallel as lesson

    for names, expected in MESSAGES.items():
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        model = MLP()
        if "tp" in names:
            lesson.split(MLP(layers=2), mesh["tp"])  # the last of three layers has no partner
            lesson.split(model, mesh["tp"])
            lesson.shard(model, mesh["dp"])
        else:
            lesson.shard(model, mesh)
        for _ in range(2):  # the first step gathers one layer more
            with Messages() as messages:
                model(torch.ones(30, 1, 28, 28)).sum().backward()
        axes = {mesh[name].get_group().group_name: name for name in names}
        found = Counter((axes[each.group], each.kind) for each in messages.noted)
        assert found == expected
    dist.barrier()


def test_messages_stay_on_their_axis():
    """Activations travel along tp, parameters along dp or shard, gradients along replicate."""
    in_group(count_messages, 4)


CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)\n"
STEP = "            optimizer.step()\n"


def test_clipping_with_convolutions_replicated_along_tp(change):
    """The cure in answers.md: the numbers are those of one process that clips."""
    answers = (ROOT / "playground" / "pages" / "answers.md").read_text()
    [cure] = re.findall(r"^( {7}def to_dtensor.*?\n)\n\d\. ", answers, re.M | re.S)
    cure = textwrap.indent(textwrap.dedent(cure), "    ")
    plan = "    parallelize_module(model, mesh, plan)\n"
    imported = "from torch.distributed.tensor.parallel import"
    more = "from torch.distributed.tensor import DTensor, Replicate, distribute_module\n"
    pairs = [(STEP, CLIP + STEP), (plan, plan + cure), (imported, more + imported)]
    flags = (*ONE_EPOCH, "--model", "cnn")
    [found] = losses(train(change(LESSON, *pairs), *flags, "--mesh", "1x2", processes=2).stdout)
    [expected] = losses(run(change("single_gpu", (STEP, CLIP + STEP)), *flags).stdout)
    assert found == pytest.approx(expected, abs=1e-10)
    assert abs(found - single_gpu(*flags)[0]["loss"]) > 1e-3


def test_a_rank_that_does_nothing(change):
    """--timeout holds for the groups of both axes, too, whose own default is half an hour."""
    line = "        train_loader.sampler.set_epoch(epoch)"
    copy = change(LESSON, (line, f"        time.sleep(9999 * (rank == 3))\n{line}"))
    jobs = ranks(copy, *ONE_EPOCH, "--timeout", 5, processes=4)
    try:
        ends = [job.wait(200) for job in jobs[:3]]
    finally:
        for job in jobs:
            job.kill()
    assert [end.returncode for end in ends] == [1, 1, 1]
    assert any("Timed out" in end.stderr for end in ends)
