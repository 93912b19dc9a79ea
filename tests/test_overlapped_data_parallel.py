"""What overlapped_data_parallel.py does by hand: for any module, early, in one order."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, run
from test_manual_data_parallel import assert_equal, held, in_ranks, make, steps
from torch import nn

CAPACITIES = [1e-9, 3e-4, 25.0]  # MiB: a bucket for each parameter, some, one for each dtype


def by_hand(rank, world_size, port, results):
    """Train by the lesson's buckets of each capacity. Puts what this rank holds into results."""
    import overlapped_data_parallel as lesson

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    for capacity in CAPACITIES:
        for overlap in (True, False):
            model = make(rank)
            lesson.send_weights(model)
            sent = held(model)
            buckets = lesson.Buckets(model, capacity)
            buckets.overlap = overlap
            results[rank, capacity, overlap] = sent, steps(model, rank, world_size, buckets.finish)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
def test_an_unusual_model_trains_as_in_one_process(world_size):
    """Frozen, tied and unused parameters, dtypes, shapes; a gradient on some ranks only."""
    dtype = torch.get_default_dtype()
    try:
        model = make(0)
        first = held(model)
        right = steps(model)
    finally:
        torch.set_default_dtype(dtype)
    results = in_ranks(by_hand, world_size)
    assert len(results) == 2 * len(CAPACITIES) * world_size
    for sent, trained in results.values():
        assert sent == first
        for one, other in zip(trained, right, strict=True):
            assert_equal(one, other)


class Ways(nn.Module):
    """Two layers of equal size that ranks use in different order."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Linear(4, 4, bias=False)

    def forward(self, rows, rank):
        """Turn rows, (N, 4), into outputs, (N, 4)."""
        layers = [self.one, self.two] if rank == 0 else [self.two, self.one]
        return layers[1](torch.tanh(layers[0](rows)))


def in_order(rank, world_size, port, results):
    """Note the order in which messages start, by the parameter in them, and the mean gradients."""
    import overlapped_data_parallel as lesson

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = Ways()
    buckets = lesson.Buckets(model, 1e-9)
    started = []

    def note(call, bucket):
        started.append(buckets.buckets.index(bucket))
        return call(bucket)

    buckets.start = partial(note, buckets.start)
    model(torch.ones(2, 4) + rank, rank).sum().backward()
    own = [parameter.grad.clone() for parameter in model.parameters()]
    early = buckets.finish()
    for gradient in own:
        dist.all_reduce(gradient)
    pairs = zip(own, model.parameters(), strict=True)
    equal = all(torch.allclose(a / world_size, b.grad) for a, b in pairs)
    results[rank] = started, early, equal
    dist.destroy_process_group()


def test_all_ranks_start_the_same_messages_in_the_same_order():
    """Though rank 0 fills the first bucket first, and rank 1 the second: it waits for the first."""
    results = in_ranks(in_order, 2)
    assert results == {0: ([0, 1], 1, True), 1: ([0, 1], 0, True)}


def test_what_is_printed_is_counted():
    """Without overlap no message is early; with overlap all are, except the last bucket's."""
    flags = (*DIGITS, "-g", 2, "--epochs", 1, "--layers", 4, "--bucket_cap_mb", 1e-6)
    out = run("overlapped_data_parallel", *flags).stdout
    rows = re.findall(r"^(\d) +(True|False) +(\d+) +(\d+) +[\d.]+ +[\d.]+$", out, re.M)
    without, overlapped = ("False", "10", "0"), ("True", "10", "9")
    assert rows == [(rank, *row) for rank in "01" for row in (without, overlapped)]
