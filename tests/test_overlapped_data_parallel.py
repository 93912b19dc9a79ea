"""What overlapped_data_parallel.py does by hand trains as one process does, with early messages."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from test_manual_data_parallel import make, steps

from watching.ranks import call

MEBIBYTE = 2**20
# Bytes of the parameters of make(), from the last one on: 80, 400, 40, 200, 40, 200, 40, 31,360.
CAPACITIES = {1e-9: 8, 280 / MEBIBYTE: 3, 1.0: 1}  # MiB of a bucket: how many buckets there are


def by_hand(rank, world_size):
    """Train by the lesson's classes. All messages start in backward(), the first of several early.

    The parameters are compared with those of one process.
    """
    import overlapped_data_parallel as lesson

    expected = steps(make(0))
    for capacity, count in {"each": 8, **CAPACITIES}.items():
        model = make(rank)
        lesson.send_weights(model)
        by = lesson.EachGradient(model) if capacity == "each" else lesson.Buckets(model, capacity)
        early = []  # for each message of a step, whether the first parameter's gradient was missing
        first = next(model.parameters())

        def note(message, early=early, first=first, **options):
            early.append(first.grad is None)
            return dist.all_reduce(message, **options)

        def check_and_finish(early=early, count=count, model=model, by=by):
            assert len(early) == count and early[0] == (count > 1)
            by.finish(model)
            assert len(early) == count
            early.clear()

        noting = SimpleNamespace(**vars(dist) | {"all_reduce": note})
        with mock.patch.object(lesson, "dist", noting):
            trained = steps(model, rank, world_size, check_and_finish)
        torch.testing.assert_close(trained, expected, atol=1e-12, rtol=0)


def test_ranks_train_as_one_process():
    """With a message for each parameter, and with 8, 3 and 1 buckets."""
    call(by_hand, 3, 3)
