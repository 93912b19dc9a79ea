"""Sharding by hand: the numbers of one process, the bytes that are held, and what is refused."""

import re
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, single_gpu, train
from forked import in_ranks, join
from torch import nn
from torch.nn import functional as F

from common.models import MLP, MODELS

TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
ODD = ("--width", 13, "--layers", 2)  # sizes that two or three ranks cannot divide
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


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("words", [STAGE_1, STAGE_3, KEPT])
def test_the_same_numbers_and_the_bytes(words, processes):
    """Odd sizes: single_gpu.py's losses, and the bytes that sizes and stage give."""
    flags = (*TWO_EPOCHS, "--double", *ODD)
    out = train(*words, *flags, processes=processes).stdout
    right = [line["loss"] for line in single_gpu(*flags)]
    assert [line["loss"] for line in epochs(out)] == pytest.approx(right, abs=1e-10)
    sizes = [parameter.numel() for parameter in MLP(13, 2).parameters()]
    layers = list(zip(sizes[::2], sizes[1::2], strict=True))
    assert held(out) == expected_bytes(layers, words, processes)


def test_bytes_of_a_parameter():
    """In float32 with two ranks: 12 in stage 1 and 8 in stage 3, where DDP has 16."""
    count = sum(parameter.numel() for parameter in MLP().parameters())
    for words, each in ((STAGE_1, 12), (STAGE_3, 8)):
        out = train(*words, *TWO_EPOCHS, processes=2).stdout
        assert sum(held(out).values()) == each * count


OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-6, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5),
}


def layers_of_a_readers_project():
    """Return a model with a convolution, a norm, a buffer and a parameter outside its layers."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(5, 5, bias=False)
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, inputs):
            return self.inner(inputs) * self.scale

    torch.manual_seed(0)
    convolution = nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3).eval(), nn.ReLU(), nn.Flatten()
    layers = *convolution, nn.Linear(15, 5), nn.LayerNorm(5), Scaled(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double()


def data(step, rank):
    """Return a rank's inputs (4, 1, 7) and labels in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, 1, 7, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (4,), generator=generator)


def trained_alone(name, world_size, backwards):
    """Train the model in one process on the batches of all ranks. Returns its parameters."""
    model = layers_of_a_readers_project()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(backwards):
            for rank in range(world_size):
                inputs, labels = data(STEPS * part + step, rank)
                (F.cross_entropy(model(inputs), labels) / world_size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def sharded_rank(rank, world_size, port, results):
    """Train the model with each optimizer in both ways, as one of the ranks."""
    import manual_fully_sharded
    import sharded_optimizer

    join(rank, world_size, port)
    for name, make_optimizer in OPTIMIZERS.items():
        for lesson, backwards in (
            ("sharded_optimizer", 1),
            ("sharded_optimizer", 2),
            ("manual_fully_sharded", 1),
            ("manual_fully_sharded", 2),
        ):
            model = layers_of_a_readers_project()
            if lesson == "sharded_optimizer":
                optimizer = sharded_optimizer.ShardedOptimizer(model, make_optimizer)
            else:
                layers = manual_fully_sharded.shard_layers(model)
                optimizer = make_optimizer([layer.shard for layer in layers])
            for step in range(STEPS):
                optimizer.zero_grad()
                for part in range(backwards):
                    inputs, labels = data(STEPS * part + step, rank)
                    F.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
            found = gathered_parameters(model)
            results[rank, name, lesson, backwards] = [each.numpy() for each in found]
    dist.destroy_process_group()


def gathered_parameters(model):
    """Return copies of all parameters. Those of a sharded layer are copied while it is whole."""
    found = {}
    hooks = []

    def copy(layer, _inputs, _output):
        for parameter in layer.parameters(recurse=False):
            if parameter.untyped_storage().nbytes():
                found[parameter] = parameter.detach().clone()

    for layer in model.modules():
        hooks.append(layer.register_forward_hook(copy, prepend=True))
    with torch.no_grad():
        model(data(0, 0)[0])
    for hook in hooks:
        hook.remove()
    return [found[parameter] for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_models_and_any_element_wise_optimizer(world_size):
    """The parameters of one process, to 1e-12, also if a step has two backward()."""
    results = in_ranks(sharded_rank, world_size)
    assert len(results) == world_size * len(OPTIMIZERS) * 4
    for (rank, name, lesson, backwards), found in results.items():
        expected = trained_alone(name, world_size, backwards)
        for mine, right in zip(found, expected, strict=True):
            words = f"{rank} {name} {lesson} {backwards}"
            torch.testing.assert_close(torch.from_numpy(mine), right, atol=1e-12, rtol=0, msg=words)


def watched_rank(rank, world_size, port, results):
    """Note what stage 3 gathers in a step and in a test."""
    import manual_fully_sharded as lesson

    from figures.memory import Gathered, held

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=5),
    )
    model = MODELS["cnn"](7)
    shards = [layer.shard for layer in lesson.shard_layers(model)]
    images, labels = torch.randn(4, 1, 28, 28), torch.arange(4)
    found = {"kept": held([*model.parameters(), *shards])}
    with Gathered() as messages:
        F.cross_entropy(model(images), labels).backward()
    found["step"] = (Counter(each.kind for each in messages.noted), messages.most)
    found["gradients"] = held(each.grad for each in [*model.parameters(), *shards])
    with Gathered() as messages, torch.no_grad():
        model(images)
    found["test"] = (Counter(each.kind for each in messages.noted), messages.most)
    found["kept after a test"] = held([*model.parameters(), *shards])
    try:
        if rank == 0:
            model(images)  # the others leave it out
    except RuntimeError as error:
        found["error"] = str(error)
    results[rank] = found
    dist.destroy_process_group()


def test_what_stage_3_gathers():
    """A layer at a time, twice in a step and once in a test."""
    results = in_ranks(watched_rank, 3)
    layers = []
    for layer in MODELS["cnn"](7).modules():
        size = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        layers += [4 * padded(size, 3)] if size else []
    for found in results.values():
        assert found["kept"] == found["gradients"] == found["kept after a test"] == sum(layers) / 3
        assert found["step"] == (Counter(all_gather=8, reduce_scatter=4), max(layers))
        assert found["test"] == (Counter(all_gather=4), max(layers))
    # The others have left out the layers for which it waits, and have ended.
    assert re.search("Timed out|closed by peer|reset by peer", results[0]["error"])


def lonely_rank(rank, world_size, port, results):
    """Try what is refused, in a group of one."""
    import manual_fully_sharded
    import sharded_optimizer

    join(rank, world_size, port)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = sharded_optimizer.ShardedOptimizer(model, OPTIMIZERS["SGD"])
    model[0](torch.ones(2)).sum().backward()
    with pytest.raises(ValueError, match=r"^1\.weight has no gradient: "):
        optimizer.step()
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match="two layers share a parameter"):
        manual_fully_sharded.shard_layers(tied)
    frozen = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        manual_fully_sharded.shard_layers(frozen)

    class HalfUsed(nn.Linear):
        def forward(self, inputs):
            return inputs @ self.weight.T

    half_used = HalfUsed(2, 2)
    manual_fully_sharded.shard_layers(half_used)
    half_used(torch.ones(2)).sum().backward()
    with pytest.raises(RuntimeError, match="a parameter got no gradient"):
        half_used(torch.ones(2))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2).double())
    with pytest.raises(TypeError, match="different dtypes"):
        sharded_optimizer.ShardedOptimizer(mixed, OPTIMIZERS["SGD"])
    mixed = nn.Linear(2, 2)
    mixed.bias = nn.Parameter(mixed.bias.data.double())
    with pytest.raises(TypeError, match="different dtypes"):
        manual_fully_sharded.shard_layers(mixed)
    sharded = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = sharded.state_dict()
    manual_fully_sharded.shard_layers(sharded)
    for refused in (sharded.state_dict, partial(sharded.load_state_dict, state)):
        with pytest.raises(RuntimeError, match="the layer is sharded: load a state before that"):
            refused()
    results["done"] = True
    dist.destroy_process_group()


def test_what_is_refused():
    """Parameters without a gradient, shared, frozen or of two dtypes, and a state_dict()."""
    assert in_ranks(lonely_rank, 1)["done"]


LIMIT = 0.05  # of the norm of the gradients, which is larger in each step


def clip_shards(shards):
    """Scale the gradients of this rank's shards by the norm over all ranks."""
    square = sum(shard.grad.square().sum() for shard in shards)
    dist.all_reduce(square)
    for shard in shards:
        shard.grad *= LIMIT / (square.sqrt() + 1e-6)  # PyTorch adds this, too


class ClippedSGD(torch.optim.SGD):
    """SGD that clips where the docstring of ShardedOptimizer says: after the reduce_scatter."""

    def step(self):
        """Clip, and make a step."""
        clip_shards(self.param_groups[0]["params"])
        super().step()


def clipping_rank(rank, world_size, port, results):
    """Train with clipping: as the docstrings say, and with PyTorch's function on this rank only."""
    import manual_fully_sharded
    import sharded_optimizer

    join(rank, world_size, port)
    for stage in (1, 3):
        for how in ("over all ranks", "on each rank"):
            model = layers_of_a_readers_project()
            if stage == 1:
                make = ClippedSGD if how == "over all ranks" else torch.optim.SGD
                optimizer = sharded_optimizer.ShardedOptimizer(model, partial(make, lr=1))
                seen = list(model.parameters())
            else:
                seen = [layer.shard for layer in manual_fully_sharded.shard_layers(model)]
                optimizer = torch.optim.SGD(seen, lr=1)
            norms = []
            for step in range(STEPS):
                optimizer.zero_grad()
                inputs, labels = data(step, rank)
                F.cross_entropy(model(inputs), labels).backward()
                if how == "on each rank":
                    norms.append(nn.utils.clip_grad_norm_(seen, LIMIT).item())
                elif stage == 3:
                    clip_shards(seen)
                optimizer.step()
            found = [each.numpy() for each in gathered_parameters(model)]
            results[rank, stage, how] = (found, norms)
    dist.destroy_process_group()


def test_clipping():
    """The way of the docstrings gives the numbers of one process; PyTorch's function does not."""
    results = in_ranks(clipping_rank, 2)
    model = layers_of_a_readers_project()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            inputs, labels = data(step, rank)
            (F.cross_entropy(model(inputs), labels) / 2).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), LIMIT) > LIMIT
        optimizer.step()
    right = [parameter.detach() for parameter in model.parameters()]
    for (_, _, how), (found, _) in results.items():
        pairs = zip(found, right, strict=True)
        apart = max((torch.from_numpy(mine) - each).abs().max().item() for mine, each in pairs)
        assert (apart < 1e-12) == (how == "over all ranks")
    for stage in (1, 3):
        norms = [results[rank, stage, "on each rank"][1] for rank in range(2)]
        assert norms[0] != pytest.approx(norms[1], rel=1e-3)


def test_an_optimizer_that_has_all_numbers(change):
    """Stage 1, exercise 1: they have no gradient, so nothing is trained."""
    copy = change(
        "sharded_optimizer", ("make_optimizer([self.shard])", "make_optimizer([self.flat])")
    )
    out = train(copy, *TWO_EPOCHS, processes=2).stdout
    first, second = (line["loss"] for line in epochs(out))
    assert second == pytest.approx(first, abs=0.01) and second > 2.2
    assert held(out)["Adam's averages"] == 0


def test_without_the_all_gather(change):
    """Stage 1, exercise 2: each rank trains its shard only, and the results get worse."""
    line = "        dist.all_gather_into_tensor(self.flat, self.shard)\n"
    out = train(change("sharded_optimizer", (line, "")), *TWO_EPOCHS, processes=2).stdout
    right = single_gpu(*TWO_EPOCHS)
    assert epochs(out)[1]["loss"] > right[1]["loss"] + 0.1


BROADCAST = """    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # all ranks start with the parameters of rank 0, as with DDP
"""
SEED = "    torch.manual_seed(args.seed)"
SHOW = "    if rank == 0:\n        show_bytes("
SAVE = """    shards = [optimizer.shard] if "shard" in dir(optimizer) else shards
    torch.save([shard.detach().clone() for shard in shards], f"FOLDER/{rank}")
"""


@pytest.mark.parametrize("words", [STAGE_1, STAGE_3])
def test_other_parameters_on_each_rank(change, words, tmp_path):
    """The last exercise of both lessons: the model is put together from shards of two models."""
    save = SAVE.replace("FOLDER", str(tmp_path))
    pairs = [(SEED, f"{SEED[:-1]} + rank)"), (SHOW, save + SHOW)]
    if words == STAGE_1:
        pairs.append((BROADCAST, ""))
    train(change(*words, *pairs), *TWO_EPOCHS, "--lr", 0, processes=2)
    for rank in (0, 1):
        torch.manual_seed(rank)
        sizes = []
        for layer in MLP().modules():
            own = [each.detach().flatten() for each in layer.parameters(recurse=False)]
            sizes += [torch.cat(own)] if own else []
        flat = [torch.cat(sizes)] if words == STAGE_1 else sizes
        for found, drawn in zip(torch.load(tmp_path / str(rank)), flat, strict=True):
            assert torch.equal(found, drawn.chunk(2)[rank])


def test_layers_that_are_not_freed(change):
    """Stage 3, exercise 1: after the last test, all layers are whole."""
    line = "            layer.register_forward_hook(self.free)\n"
    copy = change("manual_fully_sharded", (line, ""))
    whole = []
    for lesson in ("manual_fully_sharded", copy):
        whole.append(held(train(lesson, *TWO_EPOCHS, processes=2).stdout)["whole layers"])
    assert whole == [0, 236_840]


def test_an_optimizer_without_the_shards(change):
    """Stage 3, exercise 2: the parameters have no gradients, so nothing is trained."""
    pair = ("torch.optim.Adam(shards, ", "torch.optim.Adam(model.parameters(), ")
    done = train(change("manual_fully_sharded", pair), *TWO_EPOCHS, processes=2)
    first, second = (line["loss"] for line in epochs(done.stdout))
    assert second == pytest.approx(first, abs=0.01) and second > 2.2
