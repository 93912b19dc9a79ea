"""What overlapped_data_parallel.py does by hand trains as one process does, with early messages."""

import re

import pytest
import torch.distributed as dist
from conftest import DIGITS, run
from test_manual_data_parallel import assert_equal, in_ranks, join, make, steps
from torch import nn

MEBIBYTE = 2**20
# Bytes of the parameters of make(): 31,360 + 40 + 200 + 40 + 200 + 40 + 400 + 80.
CAPACITIES = {1e-9: 8, 280 / MEBIBYTE: 5, 1.0: 1}  # MiB of a bucket: how many buckets there are


def by_hand(rank, world_size, port, results):
    """Train by the lesson's classes. Puts the messages of each step, and the parameters, aside."""
    import overlapped_data_parallel as lesson

    join(rank, world_size, port)
    for capacity in ("each", *CAPACITIES):
        model = make(rank)
        lesson.send_weights(model)
        if capacity == "each":
            gradients = lesson.EachGradient(model)
        else:
            gradients = lesson.Buckets(model, capacity)
        messages = []

        def count_and_finish(messages=messages, gradients=gradients):
            messages.append(len(gradients.messages))
            gradients.finish()

        trained = steps(model, rank, world_size, count_and_finish)
        results[rank, capacity] = messages, trained
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_train_as_one_process(world_size):
    """When backward() returns, all messages of the step have been started, and none of others."""
    results = in_ranks(by_hand, world_size)
    right = steps(make(0))
    for capacity, count in {"each": 8, **CAPACITIES}.items():
        for rank in range(world_size):
            messages, trained = results[rank, capacity]
            assert messages == [count] * 3
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
    """Afterwards, no message is early. From the hooks, all of them are."""
    out = run("overlapped_data_parallel", *DIGITS, "-g", 2, "--epochs", 1).stdout
    rows = re.findall(r"^(\d)  +(\w+) +(\d+) +(\d+) +[\d.]+ +[\d.]+$", out, re.M)
    found = {(rank, how): (messages, early) for rank, how, messages, early in rows}
    # By default the first parameter, 0.19 MiB, is larger than a bucket, and the others fit in one.
    for rank in "01":
        assert found[rank, "afterwards"] == ("8", "0")
        assert found[rank, "each"] == ("8", "8")
        assert found[rank, "buckets"] == ("2", "2")
    assert len(rows) == 6
