"""What overlapped_data_parallel.py does by hand trains as one process does, with early messages."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from conftest import DIGITS, run
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
        if capacity == "each":
            averager = lesson.EachGradient(model)
        else:
            averager = lesson.Buckets(model, capacity)
        messages = []
        early = []  # for each message, whether the first parameter's gradient was missing
        first = next(model.parameters())

        def note(message, early=early, first=first, **options):
            early.append(first.grad is None)
            return dist.all_reduce(message, **options)

        def count_and_finish(messages=messages, averager=averager):
            messages.append(len(averager.handles))
            averager.finish()

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
            assert messages == [count] * 3
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
            steps(model, rank, world_size, gradients.finish)
        results[rank, capacity] = str(error.value)
    dist.barrier()  # messages without a wait() may still be on their way
    dist.destroy_process_group()


def test_a_parameter_without_a_gradient():
    """Its bucket is never complete. Each rank says so and does not train with other gradients."""
    said = "a parameter got no gradient, so its bucket was not sent"
    results = in_ranks(without_a_gradient, 2)
    assert results == {(rank, capacity): said for rank in (0, 1) for capacity in CAPACITIES}


def test_what_is_printed_is_counted():
    """Three buckets of the default model: two layers, one layer, and the first layer."""
    out = run("overlapped_data_parallel", *DIGITS, "-g", 2, "--epochs", 1).stdout
    rows = re.findall(r"^(\d)  +(\w+) +(\d+) +(\d+) +[\d.]+ +[\d.]+ +[\d.]+$", out, re.M)
    counts = {(rank, how): messages for rank, how, messages, _ in rows}
    for rank in "01":
        assert counts[rank, "afterwards"] == counts[rank, "each"] == "8"
        assert counts[rank, "buckets"] == "3"
    assert all(int(done) <= int(messages) for _, _, messages, done in rows)
    assert len(rows) == 6
