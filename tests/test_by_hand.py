"""Data parallelism by hand, if a layer is frozen, or a step has two backward() or more messages.

test_parity.py has the usual steps.
"""

from functools import partial

import expert_parallel
import manual_data_parallel
import manual_fully_sharded
import overlapped_data_parallel
import pytest
import sharded_optimizer
import torch
from torch import nn
from torch.nn import functional as F

from watch_ranks.ranks import call

ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)  # it moves zero gradients, too
RANKS = 3


def make(seed, frozen=False):
    """Return a small model. Its first layer may be frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3))
    model[0].requires_grad_(not frozen)
    return model.double()


def make_steps(model, optimizer, ranks, backwards, average=None):
    """Train with the batches of these ranks. Returns the parameters."""
    for step in range(3):
        optimizer.zero_grad()
        for part in range(backwards):
            for rank in ranks:
                generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
                inputs = torch.randn(4, 7, generator=generator, dtype=torch.float64)
                labels = torch.randint(3, (4,), generator=generator)
                (F.cross_entropy(model(inputs), labels) / len(ranks)).backward()
        if average is not None:
            average(model)
        optimizer.step()
    return list(model.parameters())


def on_a_rank(rank, frozen, once, twice):
    """Train with a frozen layer, with messages in backward(), and with two backward() in a step."""
    close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)
    ways = (
        lambda model: manual_data_parallel.average_gradients,
        lambda model: manual_data_parallel.average_in_one_bucket,
        lambda model: partial(expert_parallel.average_gradients, same_experts=None),
        lambda model: overlapped_data_parallel.Buckets(model, 0).finish,
        lambda model: overlapped_data_parallel.Buckets(model, 1e-4).finish,
    )
    for is_frozen, right in ((True, frozen), (False, once)):
        for way in ways:
            model = make(rank, is_frozen)  # each rank draws its own
            manual_data_parallel.send_weights(model)
            average = way(model)
            close(make_steps(model, ADAM(model.parameters()), [rank], 1, average), right)
        model = make(0, is_frozen)
        optimizer = sharded_optimizer.ShardedOptimizer(model, ADAM)
        parameters = make_steps(model, optimizer, [rank], 1)
        model.state_dict()  # waits for the other ranks' shards
        close(parameters, right)
    for way in ways[-2:]:
        model = make(0)
        average = way(model)
        loss = model(torch.ones(4, 7, dtype=torch.float64)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="call finish"):
            loss.backward()
        average(model)
    model[0].float()
    with pytest.raises(ValueError, match="the same dtype"):
        sharded_optimizer.ShardedOptimizer(model, ADAM)
    model = make(0)
    optimizer = sharded_optimizer.ShardedOptimizer(model, ADAM)
    with pytest.raises(RuntimeError, match="call step"):
        make_steps(model, optimizer, [rank], 2)
    model = make(0)
    layers = manual_fully_sharded.shard_layers(model)
    make_steps(model, ADAM([layer.shard for layer in layers]), [rank], 2)
    for layer in layers:
        layer.gather()
    close(list(model.parameters()), twice)
    model = make(0)
    buckets = overlapped_data_parallel.Buckets(model, 1e-4).buckets
    sent = [each for bucket in buckets for each in bucket.parameters]
    assert [*map(id, sent)] == [*map(id, reversed([*model.parameters()]))]  # the last layer first
    with pytest.raises(RuntimeError, match="no gradient"):
        overlapped_data_parallel.Buckets(model, 1).finish(model)
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="two layers"):
        manual_fully_sharded.shard_layers(tied)


def test_the_parameters_of_one_process():
    """To 1e-12, from three ranks."""
    expected = []
    for frozen, backwards in ((True, 1), (False, 1), (False, 2)):
        model = make(0, frozen)
        expected.append(make_steps(model, ADAM(model.parameters()), range(RANKS), backwards))
    call(on_a_rank, RANKS, *expected)
