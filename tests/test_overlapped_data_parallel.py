"""What overlapped_data_parallel.py does by hand trains as one process does, with early messages."""

import re
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from conftest import SHORT, epochs, run
from forked import in_ranks, join
from test_manual_data_parallel import assert_equal, make, steps
from torch import nn

MEBIBYTE = 2**20
# Bytes of the parameters of make(), from the last one on: 80, 400, 40, 200, 40, 200, 40, 31,360.
CAPACITIES = {1e-9: 8, 280 / MEBIBYTE: 3, 1.0: 1}  # MiB of a bucket: how many buckets there are


def by_hand(rank, world_size, port, results):
    """Train by the lesson's classes. Puts the messages of each step, and the parameters, aside."""
    import overlapped_data_parallel as lesson

    join(rank, world_size, port)
    for capacity in ("each", *CAPACITIES):
        model = make(rank)
        lesson.send_weights(model)
        args = SimpleNamespace(bucket_cap_mb=capacity)
        average = lesson.register("each" if capacity == "each" else "buckets", model, args)
        messages = []
        early = []  # for each message, whether the first parameter's gradient was missing
        first = next(model.parameters())

        def note(message, early=early, first=first, **options):
            early.append(first.grad is None)
            return dist.all_reduce(message, **options)

        def count_and_finish(messages=messages, early=early, model=model, average=average):
            messages.append(len(early))  # all of them have been started in backward()
            average(model)
            assert len(early) == messages[-1]

        with mock.patch.object(
            lesson, "dist", SimpleNamespace(**vars(dist) | {"all_reduce": note})
        ):
            trained = steps(model, rank, world_size, count_and_finish)
        results[rank, capacity] = messages, early, trained
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_as_one_process(world_size):
    """All messages are started in backward(), and with several, the first one starts early."""
    results = in_ranks(by_hand, world_size)
    right = steps(make(0))
    for capacity, count in {"each": 8, **CAPACITIES}.items():
        for rank in range(world_size):
            messages, early, trained = results[rank, capacity]
            assert messages == [count, 2 * count, 3 * count]
            assert early[::count] == [count > 1] * 3
            assert_equal(trained, right)


def without_a_gradient(rank, world_size, port, results):
    """Let one of the parameters get no gradient, and put into results what finish() says."""
    import overlapped_data_parallel as lesson

    join(rank, world_size, port)
    for capacity in CAPACITIES:
        model = make(0)
        model.unused = nn.Linear(1, 1).double()
        gradients = lesson.Buckets(model, capacity)
        with pytest.raises(RuntimeError) as error:
            steps(model, rank, world_size, partial(gradients.finish, model))
        results[rank, capacity] = str(error.value)
    dist.barrier()  # messages without a wait() may still be on their way
    dist.destroy_process_group()


def test_a_parameter_without_a_gradient():
    """Its bucket is never complete. Each rank says so and does not train with other gradients."""
    said = "a parameter got no gradient, so its bucket was not sent"
    results = in_ranks(without_a_gradient, 2)
    assert results == {(rank, capacity): said for rank in (0, 1) for capacity in CAPACITIES}


def test_what_is_printed():
    """A row for each way and rank, and the same numbers from each way of training."""
    lines = []
    for by in ("each", "buckets", "afterwards"):
        out = run("overlapped_data_parallel", *SHORT, "--double", "-g", 2, "--by", by).stdout
        lines += epochs(out)
        times = r"[\d.]+ +[\d.]+ +[\d.]+"
        rows = re.findall(rf"^(\d)  +(\w+) +{times}$", out, re.M)
        assert rows == [(rank, how) for how in ("afterwards", "each", "buckets") for rank in "01"]
    assert lines == [pytest.approx(lines[0])] * 3
