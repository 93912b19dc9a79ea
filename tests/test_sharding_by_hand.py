"""Sharding by hand: the parameters of one process, and what is refused.

The functions without "test" in their names run on ranks, or help them.
"""

from functools import partial

import manual_fully_sharded
import pytest
import sharded_optimizer
import torch
from forked import in_group
from torch import nn
from torch.nn import functional as F

STEPS = 5


ADAM = partial(torch.optim.Adam, lr=1e-2, eps=1e-6, fused=True)


class Scaled(nn.Module):
    """A layer with a parameter of its own, beside those of a layer in it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs):
        """Turn (N, 5) into (N, 5)."""
        return self.inner(inputs) * self.scale


def model_of_a_readers_project():
    """Return a model with a convolution, a norm, a buffer and a parameter outside its layers."""
    torch.manual_seed(0)
    convolution = nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3).eval(), nn.ReLU(), nn.Flatten()
    layers = *convolution, nn.Linear(15, 5), nn.LayerNorm(5), Scaled(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def compute_gradients(model, step, ranks):
    """Add up the gradients of the batches of these ranks, (4, 1, 7), in a step."""
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * step + rank)
        inputs = torch.randn(4, 1, 7, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (4,), generator=generator)
        (F.cross_entropy(model(inputs), labels) / len(ranks)).backward()


def make_steps(model, optimizer, ranks, backwards):
    """Train, with so many backward() in a step."""
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(backwards):
            compute_gradients(model, STEPS * part + step, ranks)
        optimizer.step()


def sharded_rank(rank, expected):
    """Train the model in both ways."""
    for backwards, right in expected.items():
        model = model_of_a_readers_project()
        optimizer = sharded_optimizer.ShardedOptimizer(model, ADAM)
        make_steps(model, optimizer, [rank], backwards)
        torch.testing.assert_close(list(model.parameters()), right, atol=1e-12, rtol=0)
        model = model_of_a_readers_project()
        layers = manual_fully_sharded.shard_layers(model)
        optimizer = ADAM([layer.shard for layer in layers])
        make_steps(model, optimizer, [rank], backwards)
        for layer in layers:
            layer.gather()
        torch.testing.assert_close(list(model.parameters()), right, atol=1e-12, rtol=0)


def test_another_model():
    """The parameters of one process, to 1e-12, with one backward() in a step, or with two."""
    expected = {}
    for backwards in (1, 2):
        model = model_of_a_readers_project()
        make_steps(model, ADAM(model.parameters()), range(3), backwards)
        expected[backwards] = list(model.parameters())
    in_group(sharded_rank, 3, expected)


class HalfUsed(nn.Linear):
    """A layer that leaves out its bias."""

    def forward(self, inputs):
        """Multiply only."""
        return inputs @ self.weight.T


def lonely_rank(rank):
    """Try what is refused, in a group of one."""
    shard = manual_fully_sharded.shard_layers
    sgd = partial(torch.optim.SGD, lr=0.1)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = sharded_optimizer.ShardedOptimizer(model, sgd)
    model[0](torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match=r"^1\.weight has no gradient: "):
        optimizer.step()
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="two layers share a parameter"):
        shard(tied)
    half_used = HalfUsed(2, 2)
    shard(half_used)
    half_used(torch.ones(2)).sum().backward()
    with pytest.raises(RuntimeError, match="a parameter got no gradient"):
        half_used(torch.ones(2))
    mixed = nn.Linear(2, 2)
    mixed.bias = nn.Parameter(mixed.bias.data.double())
    for refused in (partial(sharded_optimizer.ShardedOptimizer, mixed, sgd), partial(shard, mixed)):
        with pytest.raises(TypeError, match="different dtypes"):
            refused()
    model = nn.Linear(2, 2)
    state = model.state_dict()
    shard(model)
    for refused in (model.state_dict, partial(model.load_state_dict, state)):
        with pytest.raises(RuntimeError, match="the layer is sharded: load a state before that"):
            refused()


def test_what_is_refused():
    """Parameters without a gradient, shared, or of two dtypes, and a state_dict()."""
    in_group(lonely_rank, 1)
