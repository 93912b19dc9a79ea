"""Sharding by hand: the numbers of one process, the table, and what is refused."""

import re
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, ranks, single_gpu, train
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


def rows(out):
    """Return the rows of the table by name: parameters, gradients, Adam's state, together, ..."""
    pattern = r"^(rank \d+|formula|DDP) +([\d,]+(?: +[\d,.]+){5})$"
    table = {}
    for name, numbers in re.findall(pattern, out, re.M):
        table[name] = [float(number.replace(",", "")) for number in numbers.split()]
    return table


def padded(count, processes):
    """Return the length that all ranks can divide."""
    return -(-count // processes) * processes


def by_formula(size, words, processes):
    """Return parameters, gradients, Adam's averages and bytes sent, as the formulas have them."""
    shard = size / processes
    messages = 3 if words == STAGE_3 else 2
    sent = messages * size * (processes - 1) / processes
    if words == STAGE_1:
        return [size, size, 2 * shard, sent]
    return [shard, shard, 2 * shard, sent]


def expected_row(layers, words, processes):
    """Return what the table must show for a rank, by the sizes of each layer's parameters."""
    count = sum(sum(sizes) for sizes in layers)
    if words == STAGE_1:  # one flat tensor has all parameters, but gradients have no zeros
        held = by_formula(8 * padded(count, processes), words, processes)
        held[1] = 8 * count
        held[2] += 4  # Adam's step counter
    else:
        size = sum(8 * padded(sum(sizes), processes) for sizes in layers)
        held = by_formula(size, words, processes)
        held[2] += 4 * len(layers)
    together = sum(held[:3])
    return [*held[:3], together, together / count, held[3]]


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("words", [STAGE_1, STAGE_3, KEPT])
def test_the_same_numbers_and_the_table(words, processes):
    """Odd sizes: single_gpu.py's losses, and the bytes that sizes and stage give."""
    flags = (*TWO_EPOCHS, "--double", *ODD)
    out = train(*words, *flags, processes=processes).stdout
    right = [line["loss"] for line in single_gpu(*flags)]
    assert [line["loss"] for line in epochs(out)] == pytest.approx(right, abs=1e-10)
    sizes = [parameter.numel() for parameter in MLP(13, 2).parameters()]
    layers = list(zip(sizes[::2], sizes[1::2], strict=True))
    table = rows(out)
    assert len(table) == processes + 2
    expected = expected_row(layers, words, processes)
    for rank in range(processes):
        assert table[f"rank {rank}"] == pytest.approx(expected, abs=0.51), rank  # whole numbers
    *held, sent = by_formula(8 * sum(sizes), words, processes)
    assert table["formula"][:3] == pytest.approx(held, abs=0.51)
    assert table["formula"][5] == pytest.approx(sent, abs=0.51)
    gathers, reduces = {STAGE_1: (1, 1), STAGE_3: (6, 3), KEPT: (3, 3)}[words]
    line = f"{gathers} all_gather, {reduces} reduce_scatter, 0 all_reduce"
    assert f"messages of a step: {line}. DDP: one for each bucket" in out
    if words == STAGE_1:
        return
    (most,) = re.findall(r"at the same time: at most ([\d,]+) bytes", out)
    whole = [8 * padded(sum(layer), processes) for layer in layers]
    assert float(most.replace(",", "")) == (sum(whole) if words == KEPT else max(whole))
    for rank in range(processes):
        (line,) = re.findall(rf"^rank {rank} \|([gr.]{{60}})\|$", out, re.M)
        assert "g" in line and "r" in line


def test_sixteen_bytes_a_parameter():
    """In float32 with two ranks: 12 or 8 bytes, not 16; stage 3 sends 1.5 times as much."""
    shown = []
    for words in (STAGE_1, STAGE_3, KEPT):
        table = rows(train(*words, *TWO_EPOCHS, processes=2).stdout)
        formula = table["formula"][5] / table["DDP"][5]
        shown.append([table["rank 1"][4], table["DDP"][4], formula])
    assert shown == [[12, 16, 1], [8, 16, 1.5], [8, 16, 1]]


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
                optimizer = make_optimizer(manual_fully_sharded.shard_layers(model))
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

    from measure.memory import Gathered, held

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=5),
    )
    model = MODELS["cnn"](7)
    shards = lesson.shard_layers(model)
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
    results["done"] = True
    dist.destroy_process_group()


def test_what_is_refused():
    """Parameters without a gradient, shared ones, frozen ones: an error that says which."""
    assert in_ranks(lonely_rank, 1)["done"]


def test_a_batch_that_the_ranks_can_not_divide(main):
    """The line has the nearest that they can."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = main("sharded_optimizer", "--batch_size", 100, env=env)
    (line,) = done.stderr.strip().splitlines()
    assert line.endswith("cannot be divided by 3 processes: use --batch_size 99")


SHORT_TEST = """    test_set = torch.utils.data.Subset(test_loader.dataset, range(181))
    test_loader = {}
"""
EQUAL = "    test_loader = equal_batches(test_loader.dataset, rank, world_size)\n"
BATCHES = "equal_batches(test_set, rank, world_size)"
STRIDED = "DataLoader(test_set, 15, sampler=range(rank, 181, world_size), collate_fn=whole_batch)"


@pytest.mark.parametrize("lesson", ["manual_fully_sharded", "fully_sharded_data_parallel"])
def test_batches_that_are_equal_in_number(change, lesson):
    """Of 181 images, two ranks test 91 and 90: seven batches each, and the right accuracy.

    In batches of 15, the way of the DDP lessons, rank 0 would have one more than rank 1, and wait.
    """
    flags = (*TWO_EPOCHS, "--timeout", 10)
    size = ("len(test_set) / 1000", "len(test_set) / 30")
    out = []
    for processes in (1, 2):
        path = change(lesson, (EQUAL, SHORT_TEST.format(BATCHES)), size)
        out.append(epochs(train(path, *flags, processes=processes).stdout))
    assert [line["test"] for line in out[0]] == [line["test"] for line in out[1]]
    path = change(lesson, (EQUAL, SHORT_TEST.format(STRIDED)))
    jobs = ranks(path, *flags)
    ends = [job.wait() for job in jobs]
    assert any(end.returncode for end in ends)
    assert "waited at" in "".join(end.stderr for end in ends)


def test_an_optimizer_that_has_all_numbers(change):
    """Stage 1, exercise 1: they have no gradient, so nothing is trained."""
    copy = change(
        "sharded_optimizer", ("make_optimizer([self.shard])", "make_optimizer([self.flat])")
    )
    out = train(copy, *TWO_EPOCHS, processes=2).stdout
    first, second = (line["loss"] for line in epochs(out))
    assert second == pytest.approx(first, abs=0.01) and second > 2.2
    assert rows(out)["rank 0"][2] == 0


def test_without_the_all_gather(change):
    """Stage 1, exercise 2: each rank trains its shard only, and the results get worse."""
    line = "        dist.all_gather_into_tensor(self.flat, self.shard)\n"
    out = train(change("sharded_optimizer", (line, "")), *TWO_EPOCHS, processes=2).stdout
    right = single_gpu(*TWO_EPOCHS)
    assert epochs(out)[1]["loss"] > right[1]["loss"] + 0.1
    assert "0 all_gather, 1 reduce_scatter" in out


BROADCAST = """    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # all ranks start with the parameters of rank 0, as with DDP
"""
SEED = "    torch.manual_seed(args.seed)"
SHOW = "    show_memory("
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
    """Stage 3, exercise 1: all layers are whole at the same time when backward() begins."""
    line = "            layer.register_forward_hook(self.free)\n"
    copy = change("manual_fully_sharded", (line, ""))
    most = []
    for lesson in ("manual_fully_sharded", copy):
        out = train(lesson, *TWO_EPOCHS, processes=2).stdout
        most += re.findall(r"at most ([\d,]+) bytes", out)
        assert "8 all_gather, 4 reduce_scatter" in out
    assert most == ["200,960", "236,840"]


def test_an_optimizer_without_the_shards(change):
    """Stage 3, exercise 2: the parameters have no gradients, so nothing is trained."""
    pair = ("torch.optim.Adam(shards, ", "torch.optim.Adam(model.parameters(), ")
    done = train(change("manual_fully_sharded", pair), *TWO_EPOCHS, processes=2)
    first, second = (line["loss"] for line in epochs(done.stdout))
    assert second == pytest.approx(first, abs=0.01) and second > 2.2
