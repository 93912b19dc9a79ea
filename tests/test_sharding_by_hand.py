"""Sharding by hand: the parameters of one process, the bytes that are held, and what is refused.

The functions without "test" in their names run on ranks, or help them.
"""

import contextlib
import io
import re
from collections import Counter
from functools import partial

import manual_fully_sharded
import pytest
import sharded_optimizer
import torch
from forked import in_group
from torch import nn
from torch.nn import functional as F

from figures.memory import Gathered

STEPS = 5


def held(show_bytes, *args):
    """Return the bytes that rank 0 holds, by the names that a lesson prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        show_bytes(*args)
    found = re.findall(r"^rank 0 holds +([\d,]+) bytes of (.+)$", out.getvalue(), re.M)
    return {name: int(number.replace(",", "")) for number, name in found}


ADAM = partial(torch.optim.Adam, lr=1e-2, eps=1e-6, fused=True)
OPTIMIZERS = {
    "Adam": ADAM,
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
}


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


# Numbers in that model, and in its layers with the zeros that three ranks need to divide them.
COUNT = 152
PADDED = (12, 6, 81, 12, 3, 27, 18)


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
    """Train the model with each optimizer in both ways."""
    for (name, backwards), right in expected.items():
        model = model_of_a_readers_project()
        optimizer = sharded_optimizer.ShardedOptimizer(model, OPTIMIZERS[name])
        make_steps(model, optimizer, [rank], backwards)
        torch.testing.assert_close(list(model.parameters()), right, atol=1e-12, rtol=0)
        model = model_of_a_readers_project()
        layers = manual_fully_sharded.shard_layers(model)
        optimizer = OPTIMIZERS[name]([layer.shard for layer in layers])
        make_steps(model, optimizer, [rank], backwards)
        for layer in layers:
            layer.gather()
        torch.testing.assert_close(list(model.parameters()), right, atol=1e-12, rtol=0)


def test_other_models_and_optimizers():
    """The parameters of one process, to 1e-12, with one backward() in a step, or with two."""
    expected = {}
    for name, make_optimizer in OPTIMIZERS.items():
        for backwards in (1, 2):
            model = model_of_a_readers_project()
            make_steps(model, make_optimizer(model.parameters()), range(3), backwards)
            expected[name, backwards] = list(model.parameters())
    in_group(sharded_rank, 3, expected)


def watched_rank(rank):
    """Count what a rank holds in both stages, and what it sends and gathers in stage 3."""
    model = model_of_a_readers_project()
    optimizer = sharded_optimizer.ShardedOptimizer(model, ADAM)
    make_steps(model, optimizer, [rank], 1)
    assert held(sharded_optimizer.show_bytes, model, optimizer) == {
        "parameters": 8 * COUNT,
        "gradients": 8 * COUNT,
        "Adam's averages": 16 * -(-COUNT // 3),
    }
    whole = [8 * count for count in PADDED]
    for keep_weights in (False, True):
        model = model_of_a_readers_project()
        layers = manual_fully_sharded.shard_layers(model, keep_weights)
        optimizer = ADAM([layer.shard for layer in layers])
        with Gathered() as messages:
            compute_gradients(model, 0, [rank])
        kinds = Counter(message.kind for message in messages.noted)
        assert kinds == {"all_gather": 7 if keep_weights else 14, "reduce_scatter": 7}
        assert messages.most == (sum(whole) if keep_weights else max(whole))
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(4, 1, 7, dtype=torch.float64))
        assert held(manual_fully_sharded.show_bytes, layers, optimizer) == {
            "the parameters' shards": sum(whole) // 3,
            "whole layers": sum(whole) if keep_weights else 0,
            "gradients": sum(whole) // 3,
            "Adam's averages": 2 * sum(whole) // 3,
        }


def test_bytes_and_messages():
    """The shards, a whole layer at a time, and two all_gathers a layer; one with --keep_weights."""
    in_group(watched_rank, 3)


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
