"""The hybrid lesson: the numbers of one process on every mesh, its messages, and its exercises."""

import re
import textwrap
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from conftest import (
    DIGITS,
    ROOT,
    epochs,
    fails,
    lesson_path,
    losses,
    one_line,
    ranks,
    run,
    single_gpu,
    train,
)
from forked import in_group

from common.models import MLP
from figures.messages import Messages

LESSON = "hybrid_parallel"
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
HSDP = ("--kind", "hsdp")


@pytest.mark.parametrize(
    ("processes", "flags"),
    [
        (4, ("--model", "cnn", "--layers", 2)),  # the last linear layer has no partner
        (3, ("--mesh", "1x3", "--width", 66, "--layers", 5)),
        (3, (*HSDP, "--mesh", "1x3", "--width", 50)),  # 50 rows, which 3 ranks cannot divide
    ],
)
def test_numbers_are_those_of_one_process(processes, flags):
    """Other sizes than those of test_parity.py: the losses of single_gpu.py, to 1e-10."""
    own = [*TWO_EPOCHS, "--double", *flags]
    done = train(LESSON, *own, processes=processes)
    assert not done.stderr
    network = flags[flags.index("--mesh") + 2 :] if "--mesh" in flags else flags
    right = [line["loss"] for line in single_gpu(*TWO_EPOCHS, "--double", *network)]
    assert losses(done.stdout) == pytest.approx(right, abs=1e-10)


KEPT = r"^(rank \d  .*)  keeps ([\d,]+) parameters$"


@pytest.mark.parametrize(
    ("flags", "names", "keeps"),
    [((), ("dp", "tp"), 14_821), (HSDP, ("replicate", "shard"), 29_605)],
)
def test_the_mesh_that_is_shown(flags, names, keeps):
    """The ranks of a row follow each other, and each keeps what the docstring says."""
    flags = (*DIGITS, "--batch_size", 120, "--epochs", 1, *flags)
    rows = re.findall(KEPT, train(LESSON, *flags, processes=4).stdout, re.M)
    places = []
    for rank in range(4):
        places.append(f"rank {rank}  {names[0]} {rank // 2}  {names[1]} {rank % 2}")
    assert rows == [(place, f"{keeps:,}") for place in places]
    text = lesson_path(LESSON).read_text().split('"""')[1]
    assert f"{keeps:,}" in text


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


@pytest.mark.parametrize(
    ("ranks", "flags", "words"),
    [
        (4, ("--mesh", "3x2"), ("--mesh 3x2 needs 6 ranks, not 4",)),
        (4, ("--mesh", "0x4"), ("--mesh", "0x4 must be two numbers that are 1 or more")),
        (3, ("--mesh", "1x3"), ("a tp group of 3 cannot split --width 64: use 63",)),
        (7, (), ("7 ranks cannot divide --batch_size 120: use 119",)),
        (2, ("--model", "transformer"), ("three_axes.py", "use --model mlp or cnn")),
    ],
)
def test_flags_that_cannot_work(ranks, flags, words, main):
    """Status 2 and one line that says what to type."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": f"{ranks}"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    one_line(main(LESSON, *DIGITS, "--batch_size", 120, *flags, env=env), *words)


CLIP = "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1)\n"
STEP = "            optimizer.step()\n"


def test_clipping(change):
    """Exercise 1: every layer of the MLP is in the plan, but not the CNN's convolutions."""
    copy = change(LESSON, (STEP, CLIP + STEP))
    assert len(epochs(train(copy, *TWO_EPOCHS, processes=4).stdout)) == 2
    assert "must have the same mesh" in fails(copy, *TWO_EPOCHS, "--model", "cnn", processes=4)


def test_clipping_with_convolutions_replicated_along_tp(change):
    """Exercise 1: the cure in its answer. The numbers are those of one process that clips."""
    answers = (ROOT / "playground" / "pages" / "answers.md").read_text()
    [cure] = re.findall(r"^( {7}def to_dtensor.*?\n)\n\d\. ", answers, re.M | re.S)
    cure = textwrap.indent(textwrap.dedent(cure), "    ")
    plan = "    parallelize_module(model, mesh, plan)\n"
    imported = "from torch.distributed.tensor.parallel import"
    more = "from torch.distributed.tensor import DTensor, Replicate, distribute_module\n"
    pairs = [(STEP, CLIP + STEP), (plan, plan + cure), (imported, more + imported)]
    flags = (*TWO_EPOCHS, "--model", "cnn")
    found = losses(train(change(LESSON, *pairs), *flags, processes=4).stdout)
    expected = losses(run(change("single_gpu", (STEP, CLIP + STEP)), *flags).stdout)
    assert found == pytest.approx(expected, abs=2e-4) and len(found) == 2
    assert abs(found[1] - single_gpu(*flags)[1]["loss"]) > 1e-3


def test_an_order_for_each_rank(change):
    """Exercise 2: the ranks of a tp group add up what different images gave."""
    copy = change(LESSON, ("set_epoch(epoch)", "set_epoch(epoch + rank)"))
    found = losses(train(copy, *TWO_EPOCHS, processes=4).stdout)
    assert found[1] == pytest.approx(2.0458, abs=2e-4)


def test_fully_shard_before_the_layers_are_split(change):
    """Exercise 3: parallelize_module finds parameters that are on the other axis already."""
    split = '        split(model, mesh["tp"])\n'
    shard = '        shard(model, mesh["dp"])\n'
    copy = change(LESSON, (split, ""), (shard, shard + split))
    assert "Cannot distribute a DTensor with device mesh" in fails(copy, *TWO_EPOCHS, processes=4)


def test_a_rank_that_does_nothing(change):
    """--timeout holds for the groups of both axes, too, whose own default is half an hour."""
    line = "        train_loader.sampler.set_epoch(epoch)"
    copy = change(LESSON, (line, f"        time.sleep(9999 * (rank == 3))\n{line}"))
    jobs = ranks(copy, *TWO_EPOCHS, "--timeout", 5, processes=4)
    try:
        ends = [job.wait(200) for job in jobs[:3]]
    finally:
        for job in jobs:
            job.kill()
    assert [end.returncode for end in ends] == [1, 1, 1]
    assert any("Timed out" in end.stderr for end in ends)
