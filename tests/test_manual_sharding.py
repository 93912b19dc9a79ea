"""Sharding by hand: the numbers of one process for any model, and the table."""

import re
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import DIGITS, epochs, free_port, single_gpu, train
from torch import nn
from torch.nn import functional as F

from common.models import MLP, MODELS

TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
ODD = ("--width", 13, "--layers", 2)  # sizes that two or three ranks cannot divide
STAGES = (1, 2, 3)
PROCESSES = (1, 3)
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


def by_formula(size, stage, processes):
    """Return parameters, gradients, Adam's averages and bytes sent, as the formulas have them."""
    parameters, gradients, state = (
        size / processes if stage >= first else size for first in (3, 2, 1)
    )
    sent = (3 if stage == 3 else 2) * size * (processes - 1) / processes
    return [parameters, gradients, 2 * state, sent]


def expected_row(parameters, stage, processes, rank):
    """Return what the table must show for a rank, by the sizes of the parameters."""
    counts = [parameter.numel() for parameter in parameters]
    itemsize = parameters[0].element_size()
    if stage == 1:  # one flat tensor has all parameters, but gradients have no zeros at their end
        size = padded(sum(counts), processes) * itemsize
        held = by_formula(size, 1, processes)
        held[1] = sum(counts) * itemsize
        length = padded(sum(counts), processes) // processes
        own = min(length, sum(counts) - rank * length)  # Adam has no averages for the zeros
        held[2] = 2 * own * itemsize
    else:
        size = sum(padded(count, processes) for count in counts) * itemsize
        held = by_formula(size, stage, processes)
    held[2] += 4 * len(counts)  # step counters
    if stage < 3:  # an all_reduce tells which parameters have a gradient
        held[3] += 2 * (processes - 1) / processes * 4 * len(counts)
    together = sum(held[:3])
    return [*held[:3], together, together / sum(counts), held[3]]


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_numbers_and_the_table(stage, processes):
    """Odd sizes: single_gpu.py's losses, and the bytes that sizes and stage give."""
    flags = (*TWO_EPOCHS, "--double", *ODD)
    out = train("manual_sharding", *flags, "--stage", stage, processes=processes).stdout
    right = [line["loss"] for line in single_gpu(*flags)]
    assert [line["loss"] for line in epochs(out)] == pytest.approx(right, abs=1e-10)
    parameters = list(MLP(13, 2).double().parameters())
    table = rows(out)
    assert len(table) == processes + 2
    for rank in range(processes):
        expected = expected_row(parameters, stage, processes, rank)
        assert table[f"rank {rank}"] == pytest.approx(expected, abs=0.51), rank  # whole numbers
    size = sum(parameter.nbytes for parameter in parameters)
    for name, row in (("formula", stage), ("DDP", 0)):
        *held, sent = by_formula(size, row, processes)
        assert table[name][:3] == pytest.approx(held, abs=0.51)
        assert table[name][5] == pytest.approx(sent, abs=0.51)
    gathers, reduces, masks = {1: (1, 1, 1), 2: (6, 6, 1), 3: (12, 6, 0)}[stage]
    words = f"{gathers} all_gather, {reduces} reduce_scatter, {masks} all_reduce"
    assert f"messages of a step: {words}. DDP: one for each bucket" in out
    whole = re.search(r"at the same time: at most ([\d,]+) bytes", out)[1]
    first = padded(784 * 13, processes) + padded(13, processes)  # the largest layer
    most = first * 8 if stage == 3 else table["rank 0"][0]
    assert float(whole.replace(",", "")) == most


def test_sixteen_bytes_a_parameter():
    """In float32 with two ranks: 12, 10 and 8 bytes, not 16; stage 3 sends 1.5 times as much."""
    shown = []
    for stage in STAGES:
        table = rows(train("manual_sharding", *TWO_EPOCHS, "--stage", stage, processes=2).stdout)
        formula = table["formula"][5] / table["DDP"][5]
        shown.append([table["rank 1"][4], table["DDP"][4], formula])
    assert shown == [[12, 16, 1], [10, 16, 1], [8, 16, 1.5]]


class Odd(nn.Module):
    """Tied, frozen and unused parameters, a buffer, branches, a scalar, odd sizes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.first.bias.requires_grad = False
        self.norm = nn.LayerNorm(5)
        self.left = nn.Linear(5, 5)
        self.right = nn.Linear(5, 5, bias=False)
        self.never = nn.Linear(3, 2)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.left.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.linspace(0, 1, 5))
        self.last = nn.Linear(5, 3)

    def forward(self, inputs, branch):
        """Turn inputs (N, 7) into (N, 3), through one of two branches."""
        hidden = self.norm(self.first(inputs).relu())
        hidden = self.left(hidden) if branch == "left" else self.right(hidden)
        hidden = self.frozen(hidden.relu()) * self.scale + self.shift
        return self.last(self.tied(hidden).relu())


OPTIMIZERS = {
    "Adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-6, fused=True),
    "AdamW": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.5),
}


def branches(step, stage, world_size):
    """Return each rank's branch in a step. In stage 3 all must take the same one."""
    if step % 3 == 2:
        return ["right"] * world_size  # so the other branch has no gradient on any rank
    if step == 0 or stage == 3:
        return ["left"] * world_size
    return ["left", "right", "left", "right"][:world_size]


def data(step, rank):
    """Return a rank's inputs (4, 7) and labels in a step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (4,), generator=generator)


def trained_alone(name, stage, world_size):
    """Train the odd model in one process on the batches of all ranks. Returns its state."""
    torch.manual_seed(0)
    model = Odd().double()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(STEPS):
        losses = []
        for rank, branch in enumerate(branches(step, stage, world_size)):
            inputs, labels = data(step, rank)
            losses.append(F.cross_entropy(model(inputs, branch), labels))
        optimizer.zero_grad()
        (sum(losses) / world_size).backward()
        optimizer.step()
    return model.state_dict()


def sharded(lesson, stage, model, make_optimizer):
    """Shard a model as the lesson does. Returns its optimizer."""
    if stage == 3:
        lesson.shard_parameters(model)
        return make_optimizer(model.parameters())
    return {1: lesson.Stage1, 2: lesson.Stage2}[stage](model, make_optimizer)


def whole_state(model, names):
    """Return the whole tensors with these names. In stage 3, reading a parameter gathers it."""
    state = {}
    for name in names:
        path, _, attribute = name.rpartition(".")
        with torch.no_grad():
            state[name] = getattr(model.get_submodule(path), attribute).numpy(force=True).copy()
    return state


def odd_rank(rank, world_size, port, stage, results):
    """Train the odd model with each optimizer, as one of the ranks. Returns the states."""
    import manual_sharding as lesson

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    for name, make_optimizer in OPTIMIZERS.items():
        torch.manual_seed(0)
        model = Odd().double()
        names = list(model.state_dict())
        optimizer = sharded(lesson, stage, model, make_optimizer)
        for step in range(STEPS):
            inputs, labels = data(step, rank)
            branch = branches(step, stage, world_size)[rank]
            loss = F.cross_entropy(model(inputs, branch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results[rank, name] = whole_state(model, names)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_any_model_and_any_element_wise_optimizer(stage, world_size):
    """Tied, frozen and unused parameters: the parameters of one process, to 1e-12.

    A gradient that is None on some ranks is zero there. One that is None on all stays None, so
    momentum and weight decay leave the parameter as it is.
    """
    with mp.Manager() as manager:
        results = manager.dict()
        job = (world_size, free_port(), stage, results)
        mp.start_processes(odd_rank, job, world_size, start_method="fork")
        results = dict(results)
    for name in OPTIMIZERS:
        expected = trained_alone(name, stage, world_size)
        for rank in range(world_size):
            for key, tensor in expected.items():
                found = torch.from_numpy(results[rank, name][key])
                torch.testing.assert_close(found, tensor, atol=1e-12, rtol=0, msg=f"{name}: {key}")


def watched_rank(rank, world_size, port, results):
    """Note what stage 3 gathers in a step and in a test."""
    import manual_sharding as lesson

    from measure.memory import Messages, held

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=5),
    )
    model = MODELS["cnn"](7)
    lesson.shard_parameters(model)
    images, labels = torch.randn(4, 1, 28, 28), torch.arange(4)
    found = {"kept": held(model.parameters())}
    with Messages() as messages:
        F.cross_entropy(model(images), labels).backward()
    found["step"] = (messages.counts, messages.most_gathered)
    found["gradients"] = held(parameter.grad for parameter in model.parameters())
    with Messages() as messages, torch.no_grad():
        model(images)
    found["test"] = (messages.counts, messages.most_gathered)
    try:
        if rank == 0:
            model(images)  # rank 1 leaves it out
    except RuntimeError as error:
        found["error"] = "Timed out" in str(error) or "closed" in str(error)
    results[rank] = found
    dist.destroy_process_group()


def test_what_stage_3_gathers():
    """A layer at a time, twice in a step and once in a test."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(watched_rank, (3, free_port(), results), 3, start_method="fork")
        results = dict(results)
    layers = [
        layer for layer in MODELS["cnn"](7).modules() if list(layer.parameters(recurse=False))
    ]
    sizes = [[4 * padded(each.numel(), 3) for each in layer.parameters()] for layer in layers]
    largest = max(map(sum, sizes))
    for found in results.values():
        assert found["kept"] == found["gradients"] == sum(map(sum, sizes)) / 3
        assert found["step"] == (Counter(all_gather=16, reduce_scatter=8), largest)
        assert found["test"] == (Counter(all_gather=8), largest)
    assert results[0]["error"]  # the others have left out the layers for which it waits


def lonely_rank(rank, port, results):
    """Try what the stages refuse, in a group of one."""
    import manual_sharding as lesson

    torch.set_num_threads(1)  # a forked process has none of the threads of its parent
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    try:
        lesson.shard_parameters(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    except SystemExit as end:
        results["batch norm"] = end.code
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half())
    try:
        lesson.Stage1(mixed, OPTIMIZERS["SGD"])
    except SystemExit as end:
        results["dtypes"] = end.code
    lesson.Stage2(mixed, OPTIMIZERS["SGD"])
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    lesson.shard_parameters(model)
    model(torch.randn(3, 2)).sum().backward()
    results["updates"] = model[1].num_batches_tracked.item()
    model = nn.Linear(2, 2)
    lesson.Stage2(model, OPTIMIZERS["SGD"])
    model(torch.ones(2)).sum().backward()
    try:
        model(torch.ones(2)).sum().backward()
    except RuntimeError as error:
        results["backward"] = str(error)
    dist.destroy_process_group()


def test_what_is_refused():
    """Batch norm in stage 3 and two dtypes in stage 1, in one line; two backward() in stage 2."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(lonely_rank, (free_port(), results), 1, start_method="fork")
        results = dict(results)
    assert results["batch norm"].startswith("error: ") and "\n" not in results["batch norm"]
    assert "batch norm" in results["batch norm"] and "--stage 2" in results["batch norm"]
    assert results["dtypes"].startswith("error: ") and "--stage 2" in results["dtypes"]
    assert results["updates"] == 1
    assert "before the next backward()" in results["backward"]


@pytest.mark.parametrize("stage", [0, 4])
def test_a_stage_that_there_is_not(stage, main):
    """Status 2, one line that has the choices."""
    (line,) = main("manual_sharding", "--stage", stage).stderr.strip().splitlines()
    assert "error: " in line and "--stage" in line and "1, 2, 3" in line


def test_a_batch_that_the_ranks_can_not_divide(main):
    """The line has the nearest that they can."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    done = main("manual_sharding", "--batch_size", 100, env=env)
    (line,) = done.stderr.strip().splitlines()
    assert line.endswith("cannot be divided by 3 processes: use --batch_size 99")


FLAGS = {stage: (*TWO_EPOCHS, "--stage", stage) for stage in STAGES}


def test_an_optimizer_that_has_the_parameters(change):
    """Exercise 1: their gradients are gone when it looks for them, so nothing is trained."""
    copy = change(
        "manual_sharding", ("make_optimizer(self.shards)", "make_optimizer(self.parameters)")
    )
    out = train(copy, *FLAGS[2], processes=2).stdout
    first, second = (line["loss"] for line in epochs(out))
    assert second == pytest.approx(first, abs=0.01) and second > 2.2
    assert rows(out)["rank 0"][2] == 0


BROADCAST = """    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # all ranks start with the parameters of rank 0, as with DDP
"""


SHOW = "    images, labels = next(iter(train_loader))\n"
SAVE = """    for name in make_model(args).state_dict():
        path, _, attribute = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), attribute)
        if rank == 0:
            torch.save(tensor.detach().clone(), f"FOLDER/{name}")
"""


@pytest.mark.parametrize("stage", STAGES)
def test_other_parameters_on_each_rank(change, stage, tmp_path):
    """Exercise 2: the model is put together from shards of two models."""
    seed = "    torch.manual_seed(args.seed"
    save = SAVE.replace("FOLDER", str(tmp_path))
    pairs = [(BROADCAST, ""), (f"{seed})", f"{seed} + rank)"), (SHOW, save + SHOW)]
    train(change("manual_sharding", *pairs), *FLAGS[stage], "--lr", 0, processes=2)
    found = {name: torch.load(tmp_path / name) for name in MLP().state_dict()}
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        drawn.append(MLP().state_dict())
    if stage == 1:  # one flat tensor
        found = {"all": torch.cat([tensor.flatten() for tensor in found.values()])}
        drawn = [{"all": torch.cat([each.flatten() for each in state.values()])} for state in drawn]
    for name, tensor in found.items():
        halves = [drawn[rank][name].flatten().chunk(2)[rank] for rank in (0, 1)]
        assert torch.equal(tensor.flatten(), torch.cat(halves))


def test_layers_without_checkpoint(change):
    """Exercise 3: parameters stay whole until backward(), except those of the first layer."""
    line = "        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)\n"
    copy = change("manual_sharding", (line, ""))
    shown = []
    for lesson in ("manual_sharding", copy):
        out = train(lesson, *FLAGS[3], "--width", 512, processes=2).stdout
        shown += re.findall(r"at most ([\d,]+) bytes|of a step: (\d+) all_gather", out)
        shown.append(rows(out)["rank 0"][5] / rows(out)["DDP"][5])
    first = 784 * 512 + 512
    others = 2 * 512 * 512 + 512 * 10 + 10  # backward() needs no bias, but the last one is gathered
    expected = [f"{4 * first:,}", "16", 1.5, f"{4 * others:,}", "8", 1.0]
    assert ["".join(each) if isinstance(each, tuple) else each for each in shown] == expected
