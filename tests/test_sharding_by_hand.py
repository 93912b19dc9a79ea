"""Sharding by hand: the parameters of one process.

The functions without "test" in their names run on ranks, or help them.
"""

from functools import partial

import manual_fully_sharded
import sharded_optimizer
import torch
from torch import nn
from torch.nn import functional as F

from watching.ranks import call

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
    call(sharded_rank, 3, expected)
