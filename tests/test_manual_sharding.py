"""Sharding by hand: the same numbers as one process, what a rank holds and sends, a plain checkpoint, mistakes."""

import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import DIGITS, epochs, free_port, lesson_path, train
from torch.nn import functional as F

from common.models import MLP, MODELS

TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
ODD = ("--width", 13, "--layers", 2)  # sizes that two or three ranks can't share evenly
STAGES, PROCESSES = (1, 2, 3), (1, 3)


def rows(out):
    """Return the rows of the table by name: weights, gradients, Adam's state, together, for a weight, sent."""
    found = re.findall(r"^(rank \d+|formula|DDP) +([\d,]+(?: +[\d,.]+){5})$", out, re.M)
    return {name: [float(number.replace(",", "")) for number in numbers.split()] for name, numbers in found}


def padded(weights, processes):
    """Return the bytes of weights when each is made long enough for all ranks to have the same."""
    return sum(-(-weight.numel() // processes) * processes * weight.element_size() for weight in weights)


def expected_rows(weights, stage, processes):
    """Return what the table must show, by the sizes of the weights."""
    count, size = sum(weight.numel() for weight in weights), weights[0].element_size()

    def row(total, stage, steps=0):
        weights, gradients, state = (total / processes if stage >= first else total for first in (3, 2, 1))
        held = [weights, gradients, 2 * state + steps]
        sent = (3 if stage == 3 else 2) * total * (processes - 1) / processes
        return [*held, sum(held), sum(held) / count, sent]

    counted = row(padded(weights, processes), stage, steps=4 * len(weights))  # Adam counts its steps for each weight
    ranks = {f"rank {rank}": counted for rank in range(processes)}
    return ranks | {"formula": row(count * size, stage), "DDP": row(count * size, 0)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What single_gpu.py prints and saves."""
    path = tmp_path_factory.mktemp("reference") / "one.pt"
    out = train("single_gpu", *TWO_EPOCHS, "--double", *ODD, "--savefile", path).stdout
    return epochs(out), torch.load(path, weights_only=True)["model"]


@pytest.mark.parametrize("processes", PROCESSES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_numbers_and_the_table(stage, processes, reference, tmp_path):
    """Sizes that can't be shared evenly: single_gpu.py's lines and weights, and the bytes that sizes and stage give."""
    flags = (*TWO_EPOCHS, "--double", *ODD, "--stage", stage, "--savefile", tmp_path / "all.pt")
    out = train("manual_sharding", *flags, processes=processes).stdout
    lines, weights = reference
    assert epochs(out) == lines and len(lines) == 2
    mine = torch.load(tmp_path / "all.pt", weights_only=True)
    assert mine.keys() == {"model", "epoch", "args"} and mine["epoch"] == 2
    model = MLP(13, 2).double()
    model.load_state_dict(mine["model"])  # a plain model takes it as it is
    for name, weight in weights.items():
        torch.testing.assert_close(mine["model"][name], weight, atol=1e-12, rtol=0)
    table, expected = rows(out), expected_rows(list(model.parameters()), stage, processes)
    assert table.keys() == expected.keys()
    for name, numbers in expected.items():
        assert table[name] == pytest.approx(numbers, abs=0.51), name  # they are printed as whole numbers
        assert table[name][4] == pytest.approx(numbers[4], abs=0.0051)
    gathers = len(list(model.parameters())) * (2 if stage == 3 else 1)
    assert f"messages in a step: {gathers} all_gather and {gathers // (stage // 3 + 1)} reduce_scatter;" in out


def test_sixteen_bytes_a_weight():
    """In float32 with two ranks: 12, 10 and 8 bytes in place of DDP's 16; half as much again to send at stage 3."""
    shown = []
    for stage in STAGES:
        table = rows(train("manual_sharding", *TWO_EPOCHS, "--stage", stage, processes=2).stdout)
        shown.append([table["rank 1"][4], table["DDP"][4], table["rank 1"][5] / table["DDP"][5]])
    assert shown == [[12, 16, 1], [10, 16, 1], [8, 16, 1.5]]


def watched(rank, world_size, port, stage, results):
    """Take a step and note each message, with the layers that are whole at that time, and what is held at the end."""
    import manual_sharding as lesson

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    first = MODELS["cnn"](7)
    torch.manual_seed(rank)
    model = MODELS["cnn"](7)
    layers = [layer for layer in model.modules() if list(layer.parameters(recurse=False))]
    shards = [
        lesson.Shard(weight, layer, SimpleNamespace(stage=stage))
        for layer in layers
        for weight in layer.parameters(recurse=False)
    ]
    for shard in shards:
        shard.gather()
    parts = zip(shards, first.parameters(), strict=True)
    same = all(torch.equal(shard.weight.detach(), weight.detach()) for shard, weight in parts)
    optimizer = torch.optim.Adam([shard.mine for shard in shards], fused=True)
    messages, gather, scatter = [], dist.all_gather_single, dist.reduce_scatter_single

    def whole_layers():
        return sum(any(weight.numel() for weight in layer.parameters(recurse=False)) for layer in layers)

    def note(name, whole, collective, *tensors):
        messages.append((name, whole.nbytes * (world_size - 1) // world_size, whole_layers()))
        collective(*tensors)

    dist.all_gather_single = lambda whole, mine: note("all_gather", whole, gather, whole, mine)
    dist.reduce_scatter_single = lambda mine, whole: note("reduce_scatter", whole, scatter, mine, whole)
    images, labels = torch.randn(4, 1, 28, 28), torch.arange(4)
    with torch.no_grad():
        model(images)
    after_test = whole_layers()
    messages.clear()
    for shard in shards:
        shard.sent.clear()
    loss = F.cross_entropy(model(images), labels)
    after_forward = whole_layers()
    loss.backward()
    optimizer.step()
    if stage < 3:
        for shard in shards:
            shard.gather()
    dist.all_gather_single, dist.reduce_scatter_single = gather, scatter
    noted = sorted((name, size) for name, size, _ in messages)
    try:
        layers[0].forward(images)  # without its hooks
        complaint = ""
    except RuntimeError as error:
        complaint = type(error).__name__
    results[rank] = {
        "messages are what the lesson counts": noted
        == sorted(message for shard in shards for message in shard.sent.elements()),
        "all_gather": sum(name == "all_gather" for name, _ in noted),
        "reduce_scatter": sum(name == "reduce_scatter" for name, _ in noted),
        "most layers whole": max(count for *_, count in messages),
        "whole after a test": after_test,
        "whole after forward": after_forward,
        "whole after a step": whole_layers(),
        "storages left": sum(shard.whole.untyped_storage().nbytes() > 0 for shard in shards),
        "gradients left": sum(weight.grad is not None for weight in model.parameters()),
        "without hooks": complaint,
        "starts from rank 0's weights": same,
    }
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_messages_and_what_is_whole(stage, world_size):
    """Messages counted from outside; at stage 3 at most one layer is whole, and none after forward or a test."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.start_processes(watched, (world_size, free_port(), stage, results), world_size, start_method="fork")
        for found in results.values():
            assert found["starts from rank 0's weights"]
            assert found["messages are what the lesson counts"]
            assert (found["all_gather"], found["reduce_scatter"]) == ((16, 8) if stage == 3 else (8, 8))
            assert found["most layers whole"] == (1 if stage == 3 else 4)
            for when in ("after a test", "after forward", "after a step"):
                assert found[f"whole {when}"] == (0 if stage == 3 else 4), when
            assert found["storages left"] == (0 if stage == 3 else 8)
            assert found["gradients left"] == 0
            assert found["without hooks"] == ("RuntimeError" if stage == 3 else "")
        assert len(results) == world_size


@pytest.mark.parametrize("stage", [0, 4])
def test_a_stage_that_there_is_not(stage, main):
    """Status 2, one line that has the choices."""
    (line,) = main("manual_sharding", "--stage", stage).stderr.strip().splitlines()
    assert "error: " in line and "--stage" in line and "1, 2, 3" in line


def test_a_batch_that_the_ranks_can_not_share(main):
    """The line has the nearest that they can."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    (line,) = main("manual_sharding", "--batch_size", 100, env=env).stderr.strip().splitlines()
    assert "--batch_size 100 can't be shared by 3 processes: use 99" in line


@pytest.fixture
def broken(tmp_path):
    """Return a function that runs the lesson with texts replaced, by two ranks, and returns its output."""

    def ran(*pairs, flags):
        text = lesson_path("manual_sharding").read_text()
        start = text.index('"""', 3)
        for old, new in pairs:
            assert text[start:].count(old) == 1, old
            text = text[:start] + text[start:].replace(old, new)
        copy = tmp_path / "manual_sharding.py"
        copy.write_text(text)
        return train(copy, *TWO_EPOCHS, *flags, processes=2).stdout

    return ran


@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_that_has_the_weights(broken, stage):
    """Their gradients are gone when it looks for them: nothing is trained, in silence. Adam's state is empty."""
    out = broken(("[shard.mine for shard in shards]", "model.parameters()"), flags=("--stage", stage))
    first, second = (line["loss"] for line in epochs(out))
    assert second == pytest.approx(first, abs=0.01) and second > 2.2
    assert rows(out)["rank 0"][2] == 0


@pytest.mark.parametrize("stage", STAGES)
def test_other_weights_on_each_rank(broken, stage, tmp_path):
    """Without the broadcast the slices of all ranks are put together: half a weight is rank 0's, half rank 1's."""
    pairs = ("        dist.broadcast(self.whole, src=0)  # all ranks start from rank 0's, as with DDP\n", ""), (
        "    torch.manual_seed(args.seed)\n", "    torch.manual_seed(args.seed + rank)\n")  # fmt: skip
    broken(*pairs, flags=("--stage", stage, "--lr", 0, "--savefile", tmp_path / "c.pt"))
    found = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    drawn = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        drawn.append(MLP().state_dict())
    for name, weight in found.items():
        halves = [drawn[rank][name].flatten().chunk(2)[rank] for rank in (0, 1)]
        assert torch.equal(weight.flatten(), torch.cat(halves))
