"""Sharding by hand: the numbers of one process, the bytes that are held, and what is refused."""

import re
from collections import Counter
from functools import partial

import manual_fully_sharded
import pytest
import sharded_optimizer
import torch
import torch.distributed as dist
from conftest import DIGITS, losses, single_gpu, train
from forked import in_group
from torch import nn
from torch.nn import functional as F

from common.models import MLP, MODELS
from figures.memory import Gathered
from figures.memory import held as bytes_of

TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
ODD = ("--width", 13, "--layers", 2)  # sizes that three ranks cannot divide
STAGE_1 = ("sharded_optimizer",)
STAGE_3 = ("manual_fully_sharded",)
KEPT = ("manual_fully_sharded", "--keep_weights")
STEPS = 5


def held(out):
    """Return the bytes that rank 0 holds, by the names that a lesson prints."""
    found = re.findall(r"^rank 0 holds +([\d,]+) bytes of (.+)$", out, re.M)
    return {name: int(number.replace(",", "")) for number, name in found}


def padded(count, processes):
    """Return the length that all ranks can divide."""
    return -(-count // processes) * processes


def expected_bytes(layers, words, processes):
    """Return what rank 0 must hold in float64, by the sizes of each layer's parameters."""
    count = sum(sum(sizes) for sizes in layers)
    if words == STAGE_1:  # one flat tensor has all parameters, and zeros at its end
        averages = 16 * padded(count, processes) // processes
        return {"parameters": 8 * count, "gradients": 8 * count, "Adam's averages": averages}
    whole = sum(8 * padded(sum(sizes), processes) for sizes in layers)
    shards = whole // processes
    return {
        "the parameters' shards": shards,
        "whole layers": whole if words == KEPT else 0,
        "gradients": shards,
        "Adam's averages": 2 * shards,
    }


@pytest.mark.parametrize("words", [STAGE_1, STAGE_3, KEPT])
def test_the_same_numbers_and_the_bytes(words):
    """Odd sizes: single_gpu.py's losses, and the bytes that sizes and stage give."""
    flags = (*TWO_EPOCHS, "--double", *ODD)
    out = train(*words, *flags, processes=3).stdout
    right = [line["loss"] for line in single_gpu(*flags)]
    assert losses(out) == pytest.approx(right, abs=1e-10)
    sizes = [parameter.numel() for parameter in MLP(13, 2).parameters()]
    layers = list(zip(sizes[::2], sizes[1::2], strict=True))
    assert held(out) == expected_bytes(layers, words, 3)


LIMIT = 0.05  # of the norm of the gradients, which is larger in each step


class ClippedSGD(torch.optim.SGD):
    """SGD that clips as the docstrings of the lessons say, inside step()."""

    def step(self):
        """Clip by the norm over all ranks, and make a step."""
        parameters = self.param_groups[0]["params"]
        square = sum(each.grad.square().sum() for each in parameters)
        if dist.is_initialized():
            dist.all_reduce(square)
        assert square.sqrt() > LIMIT
        nn.utils.clip_grads_with_norm_(parameters, LIMIT, square.sqrt())
        super().step()


OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-6, fused=True),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "clipped": partial(ClippedSGD, lr=1),
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
    """The parameters of one process, to 1e-12, also with clipping, or two backward() in a step."""
    expected = {}
    for name, make_optimizer in OPTIMIZERS.items():
        for backwards in (1, 2):
            model = model_of_a_readers_project()
            make_steps(model, make_optimizer(model.parameters()), range(3), backwards)
            expected[name, backwards] = list(model.parameters())
    in_group(sharded_rank, 3, expected)


def rank_with_a_norm(rank):
    """Find the norm that PyTorch would take to clip."""
    for stage in (1, 3):
        model = model_of_a_readers_project()
        seen = list(model.parameters())
        if stage == 3:
            seen = [layer.shard for layer in manual_fully_sharded.shard_layers(model)]
        compute_gradients(model, 0, [rank])
        norms = [None, None]
        norm = nn.utils.clip_grad_norm_(seen, LIMIT)
        dist.all_gather_object(norms, norm.item())
        assert norms[0] != pytest.approx(norms[1], rel=1e-3)


def test_the_norm_of_one_rank():
    """Before the gradients are averaged, or of shards: clip_grad_norm_() differs between ranks."""
    in_group(rank_with_a_norm, 2)


def watched_rank(rank, layers):
    """Note what stage 3 gathers in a step and in a test."""
    model = MODELS["cnn"](7)
    shards = [layer.shard for layer in manual_fully_sharded.shard_layers(model)]
    tensors = [*model.parameters(), *shards]
    images, labels = torch.randn(4, 1, 28, 28), torch.arange(4)
    assert bytes_of(tensors) == sum(layers) / 3
    with Gathered() as messages:
        F.cross_entropy(model(images), labels).backward()
    kinds = Counter(each.kind for each in messages.noted)
    assert kinds == {"all_gather": 8, "reduce_scatter": 4} and messages.most == max(layers)
    assert bytes_of(each.grad for each in tensors) == sum(layers) / 3
    with Gathered() as messages, torch.no_grad():
        model(images)
    kinds = Counter(each.kind for each in messages.noted)
    assert kinds == {"all_gather": 4} and messages.most == max(layers)
    assert bytes_of(tensors) == sum(layers) / 3


def test_what_stage_3_gathers():
    """A layer at a time, twice in a step and once in a test."""
    layers = []
    for layer in MODELS["cnn"](7).modules():
        size = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        layers += [4 * padded(size, 3)] if size else []
    in_group(watched_rank, 3, layers)


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
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        shard(nn.Linear(2, 2).requires_grad_(False))
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
    """Parameters without a gradient, shared, frozen or of two dtypes, and a state_dict()."""
    in_group(lonely_rank, 1)


@pytest.mark.parametrize(
    ("lesson", "pair"),
    [
        ("sharded_optimizer", ("make_optimizer([self.shard])", "make_optimizer([self.flat])")),
        ("manual_fully_sharded", ("Adam(shards, ", "Adam(model.parameters(), ")),
    ],
)
def test_an_optimizer_of_what_has_no_gradient(lesson, pair, change):
    """Stage 1, exercise 1, and stage 3, exercise 2: nothing is trained, without an error."""
    out = train(change(lesson, pair), *TWO_EPOCHS, processes=2).stdout
    first, second = losses(out)
    assert second == pytest.approx(first, abs=0.01)
    assert second == pytest.approx(2.31, abs=0.01)
    assert held(out)["Adam's averages"] == 0


def test_without_the_all_gather(change):
    """Stage 1, exercise 2: each rank trains its shard only, and the results get worse."""
    line = "        dist.all_gather_into_tensor(self.flat, self.shard)\n"
    out = train(change("sharded_optimizer", (line, "")), *TWO_EPOCHS, processes=2).stdout
    right = single_gpu(*TWO_EPOCHS)
    assert losses(out)[1] > right[1]["loss"] + 0.1
    assert set(held(out).values()) == {236_840}  # as the docstring shows them


def mlp_of(seed):
    """Return an MLP whose numbers are drawn with a seed of its own, and its layers' numbers."""
    torch.manual_seed(seed)
    model = MLP()
    flat = [each.detach().flatten().clone() for each in model.parameters()]
    return model, [torch.cat(pair) for pair in zip(flat[::2], flat[1::2], strict=True)]


def assert_mixed(found, zero, one):
    """Check that the halves of a tensor are those of two others."""
    assert torch.equal(found, torch.cat([zero.chunk(2)[0], one.chunk(2)[1]]))


def mixed_rank(rank):
    """Make both kinds of shards of a model that each rank has drawn itself."""
    zero, one = mlp_of(0)[1], mlp_of(1)[1]
    model, _ = mlp_of(rank)
    optimizer = sharded_optimizer.ShardedOptimizer(model, partial(torch.optim.SGD, lr=0))
    model(torch.ones(1, 784)).sum().backward()
    optimizer.step()
    assert_mixed(optimizer.flat, torch.cat(zero), torch.cat(one))
    layers = manual_fully_sharded.shard_layers(mlp_of(rank)[0])
    for layer, zero_layer, one_layer in zip(layers, zero, one, strict=True):
        layer.gather()
        assert_mixed(layer.whole, zero_layer, one_layer)


def test_other_parameters_on_each_rank():
    """The last exercise of both lessons: the model is put together from shards of two models."""
    in_group(mixed_rank, 2)


def test_layers_that_are_not_freed(change):
    """Stage 3, exercise 1: the numbers are right, and after the last test all layers are whole."""
    line = "            layer.register_forward_hook(self.free)\n"
    copy = change("manual_fully_sharded", (line, ""))
    out = train(copy, *TWO_EPOCHS, processes=2).stdout
    right = [line["loss"] for line in single_gpu(*TWO_EPOCHS)]
    assert losses(out) == pytest.approx(right, abs=2e-4)
    assert held(out)["whole layers"] == 236_840
    assert held(out)["the parameters' shards"] == 118_420
