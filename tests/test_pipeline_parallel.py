"""The pipeline lessons: each rank holds only its own stages, frozen ones, shared parameters.

test_parity.py has the numbers.
"""

import copy
import re
from datetime import timedelta

import manual_pipeline
import pipeline_parallel
import pytest
import torch
from launch import SHORT, run
from torch import nn
from torch.distributed.pipelining import schedules
from torch.nn import functional as F

from watch_ranks.ranks import call


@pytest.mark.parametrize(
    ("lesson", "flags"),
    [("manual_pipeline", ()), ("pipeline_parallel", ("--schedule", "Interleaved1F1B"))],
)
def test_a_rank_holds_only_what_it_says_that_it_keeps(lesson, flags, change):
    """All parameters in its memory are counted, and the numbers are those of the docstring."""
    counted = "sum(parameter.numel() for parameter in model.parameters())\n"
    check = f"""    alive = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter]
    assert sum(each.numel() for each in alive) == {counted}"""
    changed = change(lesson, (counted, counted + check), ("import os\n", "import gc\nimport os\n"))
    out = run(changed, *SHORT, *flags, processes=2).stdout
    assert re.findall(r"keeps .*?([\d,]{3,}) parameters", out) == ["54,400", "4,810"]


def train_behind_a_frozen_stage(rank):
    """Compare the gradients of the second stage by hand. PyTorch's would be wrong: a refusal.

    Images of another shape are refused on all ranks.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    layers[0].requires_grad_(False)
    images, labels = torch.randn(6, 4), torch.randint(3, (6,))
    right = copy.deepcopy(layers)
    F.cross_entropy(right(images), labels).backward()
    stage, shapes = manual_pipeline.make_stage(layers, rank, images[0])
    for passes in (["F0", "F1", "B0", "B1"], ["F0", "F1", "I0", "W0", "B1"]):
        model = manual_pipeline.Pipeline(stage, shapes, passes, timedelta(minutes=1))
        model.zero_grad()
        model(images, labels)
        torch.testing.assert_close(stage[0].weight.grad, right[rank].weight.grad)
    with pytest.raises(ValueError, match="images of shape"):
        model(images.reshape(6, 2, 2), labels)
    with pytest.raises(ValueError, match="frozen stage"):
        pipeline_parallel.make_other("DualPipeV", nn.Sequential(*layers, *right), "cpu", 2)


def test_a_frozen_stage():
    """It gets no gradient, and those behind it the right one, or PyTorch's schedule is refused."""
    call(train_behind_a_frozen_stage, 2)


@pytest.mark.parametrize("lesson", [manual_pipeline, pipeline_parallel])
def test_stages_that_share_a_parameter(lesson):
    """Each would train its own copy."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert len(lesson.cut(layers, 2)) == 2
    layers[2].weight = layers[0].weight
    with pytest.raises(ValueError, match="share"):
        lesson.cut(layers, 2)


@pytest.mark.parametrize(("ranks", "chunks", "count"), [(1, 2, 3), (2, 2, 4), (4, 3, 16)])
def test_interleaved_is_the_order_of_pytorch(ranks, chunks, count):
    """The rule of the lesson gives the passes of each rank."""
    schedule = object.__new__(schedules.ScheduleInterleaved1F1B)  # without stages
    schedule.pp_group_size = schedule.microbatches_per_round = ranks
    schedule.n_local_stages, schedule.number_of_rounds = chunks, count // ranks
    schedule._n_microbatches = count
    for rank in range(ranks):
        passes = [str(each) for each in schedule._calculate_single_rank_operations(rank) if each]
        assert pipeline_parallel.interleaved(rank, ranks, count, chunks) == passes
    if ranks > 1:
        with pytest.raises(ValueError, match="multiple"):
            pipeline_parallel.interleaved(0, ranks, count + 1, chunks)
