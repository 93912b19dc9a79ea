"""Data parallelism by hand, for any model: the parameters of one process, in so many messages."""

from functools import partial

import manual_data_parallel as manual
import manual_fully_sharded
import overlapped_data_parallel as overlapped
import sharded_optimizer
import torch
from torch import nn
from torch.nn import functional as F

from watching.messages import Messages
from watching.ranks import call

ADAM = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)  # it moves zero gradients, too
RANKS = 3
KIB = 1 / 1024  # MiB


class Scaled(nn.Module):
    """A layer with a parameter of its own, beside those of a layer in it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs):
        """Turn (N, 5) into (N, 5)."""
        return self.inner(inputs) * self.scale


def make(seed, frozen=False):
    """Return a model with a convolution, norms and a parameter outside its layers: 1,216 bytes.

    Its convolution may be frozen.
    """
    torch.manual_seed(seed)
    convolution = nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3).eval(), nn.ReLU(), nn.Flatten()
    layers = *convolution, nn.Linear(15, 5), nn.LayerNorm(5), Scaled(), nn.Linear(5, 3)
    layers[0].requires_grad_(not frozen)
    return nn.Sequential(*layers).double()


def make_steps(model, optimizer, ranks, backwards=1, average=None):
    """Train with the batches of these ranks. Returns how many all_reduces a step has made."""
    for step in range(3):
        optimizer.zero_grad()
        with Messages() as messages:
            for part in range(backwards):
                for rank in ranks:
                    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
                    inputs = torch.randn(4, 1, 7, generator=generator, dtype=torch.float64)
                    labels = torch.randint(3, (4,), generator=generator)
                    (F.cross_entropy(model(inputs), labels) / len(ranks)).backward()
            in_backward = len(messages.of("all_reduce"))
            if average is not None:
                average(model)
        optimizer.step()
    return in_backward, len(messages.of("all_reduce"))


def each_gradient(model):
    """Return the function that ends a step, of the lesson's first class."""
    return overlapped.EachGradient(model).finish


def buckets(capacity, model):
    """Return the function that ends a step, of the lesson's buckets."""
    return overlapped.Buckets(model, capacity).finish


# Ways to average: whether the convolution is frozen, all_reduces in backward(), and in all.
AVERAGES = [
    (lambda model: manual.average_gradients, False, 0, 12),
    (lambda model: manual.average_gradients, True, 0, 10),
    (lambda model: manual.average_in_one_bucket, True, 0, 1),
    (each_gradient, False, 12, 12),
    (partial(buckets, 0.2 * KIB), False, 3, 3),
    (partial(buckets, 10 * KIB), False, 1, 1),
]


def on_a_rank(rank, expected):
    """Train in all ways."""
    close = partial(torch.testing.assert_close, atol=1e-12, rtol=0)
    for way, frozen, in_backward, in_all in AVERAGES:
        model = make(rank, frozen)
        manual.send_weights(model)
        average = way(model)
        counts = make_steps(model, ADAM(model.parameters()), [rank], average=average)
        assert counts == (in_backward, in_all)
        close(list(model.parameters()), expected[1, frozen])
    for backwards in (1, 2):
        model = make(0)
        optimizer = sharded_optimizer.ShardedOptimizer(model, ADAM)
        make_steps(model, optimizer, [rank], backwards)
        close(list(model.parameters()), expected[backwards, False])
        model = make(0)
        layers = manual_fully_sharded.shard_layers(model)
        make_steps(model, ADAM([layer.shard for layer in layers]), [rank], backwards)
        for layer in layers:
            layer.gather()
        close(list(model.parameters()), expected[backwards, False])


def test_the_parameters_of_one_process():
    """To 1e-12, with a frozen layer where the lesson allows it, or two backward() in a step."""
    expected = {}
    for backwards, frozen in ((1, False), (1, True), (2, False)):
        model = make(0, frozen)
        make_steps(model, ADAM(model.parameters()), range(RANKS), backwards)
        expected[backwards, frozen] = list(model.parameters())
    call(on_a_rank, RANKS, expected)
