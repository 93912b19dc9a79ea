"""Every training lesson arrives at the numbers of single_gpu.py, from any number of processes.

In float64 the printed losses must agree to 1e-10 and the parameters to 1e-12, because then only
rounding differs in float32. test_readme.py compares what the lessons print in float32.
"""

import copy
import functools
import tempfile
from pathlib import Path

import pytest
import torch
from conftest import DIGITS, epochs, one_process, run, single_gpu, talks, train
from forked import in_group
from lessons import LESSONS
from parameters import largest_difference
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common.models import MODELS

pytestmark = pytest.mark.quick
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
VARIANTS = {  # flags of a lesson, and the numbers of processes; None: it takes none
    "data_parallel": {(): (None,), ("--by", "hand"): (1, 3)},
    "manual_data_parallel": {(): (1, 3), ("--bucket",): (3,)},
    "overlapped_data_parallel": {(): (1, 3)},
    "distributed_data_parallel": {(): (1, 4)},
    "distributed_data_parallel2": {(): (1, 3)},
    "distributed_data_parallel_torchrun": {(): (1, 3)},
    "distributed_data_parallel_resumable": {(): (1, 3)},
    "model_parallel": {
        (): (None,),
        ("--pipelined",): (None,),
        ("--pipelined", "--micro_batches", 7): (None,),
    },
    "manual_pipeline": {(): (1, 2), ("--schedule", "1F1B"): (3, 4)},
    "pipeline_parallel": {
        (): (1, 4),
        ("--schedule", "1F1B"): (3,),
        ("--schedule", "Interleaved1F1B"): (2,),
        ("--schedule", "InterleavedZeroBubble"): (2,),
    },
    "sharded_optimizer": {(): (1, 3, 4)},
    "manual_fully_sharded": {(): (1, 3, 4), ("--keep_weights",): (2,)},
    "fully_sharded_data_parallel": {(): (1, 4), ("--keep_weights",): (2,), ("--meta",): (3,)},
    "fully_sharded_checkpoints": {(): (1, 3)},
    "tensor_parallel": {(): (1, 4), ("--by", "dtensor"): (4,)},
    "hybrid_parallel": {
        (): (2, 4),
        ("--kind", "hsdp"): (4,),
        ("--kind", "hsdp", "--mesh", "1x4"): (4,),
        ("--kind", "hsdp", "--mesh", "4x1"): (4,),
    },
    "profile_steps": {
        ("--average", "ddp"): (2,),
        ("--average", "each"): (3,),
        ("--average", "bucket"): (2,),
    },
}
OF_TRANSFORMERS = {  # lessons that train the transformer only
    "mixed_precision": {("--precision", "full"): (2,), ("--precision", "full", "--sharded"): (2,)},
    "activation_checkpointing": {
        (): (1, 2),
        ("--checkpoint", "second"): (2,),
        ("--sharded",): (2,),
    },
    "sequence_parallel": {
        (): (1, 2, 4),
        ("--sequence",): (4,),
        ("--by", "dtensor"): (2,),
        ("--by", "dtensor", "--sequence"): (4,),
    },
    "context_parallel": {(): (1, 2, 4), ("--order", "plain"): (3,), ("--by", "ulysses"): (4,)},
    "expert_parallel": {("--experts", 1): (1,)},  # with more experts it is another model
    "three_axes": {(): (1, 4), ("--mesh", "2x2x2"): (8,), ("--mesh", "1x2x2", "--fsdp"): (4,)},
}
# Flags that select a model. One epoch of the larger ones shows as much as two.
MODEL = {
    "mlp": (*TWO_EPOCHS, "--model", "mlp"),
    "cnn": (*TWO_EPOCHS, "--model", "cnn", "--epochs", 1),
    "transformer": (*TWO_EPOCHS, "--model", "transformer", "--epochs", 1),
}
MODEL["small transformer"] = (*MODEL["transformer"], "--tokens", 8, "--width", 16)
NO_PARITY = {"distributed_data_parallel_resnet"}  # because of batch norm
FLAT_SHARDS = {"sharded_optimizer", "manual_fully_sharded"}


def cases():
    """Return what is trained: (lesson, flags, processes, model).

    The MLP is trained with all flags and numbers of processes, the other models once by each
    lesson. Two lessons do not split the layers of the transformer. Lessons that train nothing else
    train it once in its usual size, and then a small one.
    """
    found = []
    for lesson, variants in VARIANTS.items():
        for flags, counts in variants.items():
            found += [(lesson, flags, processes, "mlp") for processes in counts]
        flags, counts = next(iter(variants.items()))
        found.append((lesson, flags, counts[-1], "cnn"))
        if lesson == "hybrid_parallel":
            flags = ("--kind", "hsdp")
        if lesson != "tensor_parallel":
            found.append((lesson, flags, counts[-1], "transformer"))
    for lesson, variants in OF_TRANSFORMERS.items():
        model = "transformer"
        for flags, counts in variants.items():
            for processes in reversed(counts):
                found.append((lesson, flags, processes, model))
                model = "small transformer"
    return found


def printed(lesson, *flags, processes=None, env=None):
    """Run a lesson. Returns its epoch lines."""
    with tempfile.TemporaryDirectory() as folder:
        where = ()
        if lesson == "distributed_data_parallel_resumable":
            where = ("--run_dir", folder)
        if lesson == "profile_steps":
            where = ("--out", folder)
        done = train(lesson, *flags, *where, processes=processes, env=env)
        return epochs(done.stdout)


def with_parameters(lesson, *flags, folder, processes=None):
    """Run a lesson in float64. Its ranks write their parameters to the folder."""
    env = {"PARAMETERS": str(folder)}
    return printed(lesson, "--double", *flags, processes=processes, env=env)


@functools.cache
def expected_parameters(model):
    """Return the parameters of single_gpu.py in float64, which runs only once for each model."""
    with tempfile.TemporaryDirectory() as folder:
        with_parameters("single_gpu", *MODEL[model], folder=folder)
        return torch.load(Path(folder) / "rank0.pt")


def test_all_training_lessons_are_here():
    """A lesson that trains has parity, or a reason why it can't."""
    training = {lesson for lesson in LESSONS if not talks(lesson)} - {"single_gpu"}
    assert training == VARIANTS.keys() | OF_TRANSFORMERS.keys() | NO_PARITY


@pytest.mark.parametrize(("lesson", "flags", "processes", "model"), cases())
def test_float64(lesson, flags, processes, model, tmp_path, record_property):
    """All variants: the same losses and parameters."""
    flags = (*MODEL[model], *flags)
    lines = with_parameters(lesson, *flags, folder=tmp_path, processes=processes)
    assert lines == one_process(*MODEL[model], "--double", apart=1e-10)
    by_hand = not {"dtensor", "--fsdp"}.intersection(flags)
    if lesson in ("tensor_parallel", "sequence_parallel", "three_axes") and by_hand:
        return  # their shards are parts of rows or columns, so only losses are compared
    if lesson == "expert_parallel":
        return  # it has routers in addition
    flat = lesson in FLAT_SHARDS
    difference = largest_difference(tmp_path, expected_parameters(model), flat)
    assert difference < 1e-12
    record_property("largest difference of a parameter in float64", difference)


def test_a_checkpoint_has_what_it_should(tmp_path):
    """Four keys, plain values, and a state for each parameter."""
    path = tmp_path / "c.pt"
    printed("distributed_data_parallel", *MODEL["cnn"], "--savefile", path, processes=2)
    checkpoint = torch.load(path, weights_only=True)
    assert set(checkpoint) == {"model", "optimizer", "epoch", "args"}
    assert checkpoint["epoch"] == 1
    assert checkpoint["args"]["batch_size"] == 120
    model = MODELS["cnn"]()
    model.load_state_dict(checkpoint["model"])
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    assert len(optimizer.state) == len(list(model.parameters()))


def test_mnist_gives_the_same_numbers(mnist):
    """An epoch on the real MNIST: the same losses and accuracies from two processes as from one."""
    flags = ("--data_dir", mnist, "--epochs", 1, "--device", "cpu")
    (one,) = epochs(run("single_gpu", *flags).stdout)
    (two,) = epochs(run("distributed_data_parallel", *flags, "-g", 2).stdout)
    assert one["test"] > 90
    assert two["loss"] == pytest.approx(one["loss"], abs=2e-4)
    assert two["train"] == pytest.approx(one["train"], abs=0.02)
    assert two["test"] == pytest.approx(one["test"], abs=0.2)


def test_the_learning_rate_and_the_seed_matter():
    """Parity would mean nothing if every run gave the same numbers whatever it was told."""
    reference = single_gpu(*TWO_EPOCHS)[-1]["loss"]
    for flags in (("--lr", 2e-3), ("--seed", 1), ("--batch_size", 60)):
        (*_, last) = single_gpu(*TWO_EPOCHS, *flags)
        assert abs(last["loss"] - reference) > 1e-3, flags


def test_float64_starts_from_the_same_numbers():
    """With --double, the losses are those of float32, with more digits."""
    for single, double in zip(
        single_gpu(*TWO_EPOCHS), single_gpu(*TWO_EPOCHS, "--double"), strict=True
    ):
        assert double["loss"] == pytest.approx(single["loss"], abs=2e-4)
        assert round(double["loss"], 4) != double["loss"]


def resnet_by_hand(model, shares, accumulate):
    """Train as the ranks of the ResNet lesson do, in one process, micro-batch by micro-batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
    for ranks in shares:
        optimizer.zero_grad()
        for images, labels in ranks:
            pieces = images.tensor_split(accumulate), labels.tensor_split(accumulate)
            for piece in zip(*pieces, strict=True):
                loss = F.cross_entropy(model(piece[0]), piece[1])
                (loss * len(piece[1]) / len(labels) / len(ranks)).backward()
        optimizer.step()
    return dict(model.named_parameters())


def resnet_rank(rank, accumulate, batches, model, results):
    """Train with the lesson's own run_epoch, as one of some ranks."""
    import distributed_data_parallel_resnet as lesson

    model = copy.deepcopy(model)  # what spawn hands on is shared by all ranks
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
    share = [ranks[rank] for ranks in batches]
    step = functools.partial(lesson.update, wrapped, optimizer, accumulate)
    lesson.run_epoch(wrapped, share, torch.device("cpu"), step)
    if rank == 0:
        torch.save(dict(model.named_parameters()), results)


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (2, 1), (2, 3), (3, 2)])
def test_batch_norm_and_accumulation_as_in_one_process(world_size, accumulate, tmp_path):
    """DDP, pieces of unequal length and no_sync change nothing but rounding: 1e-12 in float64."""
    torch.manual_seed(0)
    norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    layers = *norm, nn.Flatten(), nn.Linear(4 * 6 * 6, 10)
    model = nn.Sequential(*layers).double()
    images = torch.randn(2, world_size, 7, 3, 8, 8).double()
    labels = torch.randint(10, (2, world_size, 7))
    batches = [list(zip(*step, strict=True)) for step in zip(images, labels, strict=True)]
    in_group(resnet_rank, world_size, accumulate, batches, model, tmp_path / "weights.pt")
    expected = resnet_by_hand(model, batches, accumulate)
    for name, weight in torch.load(tmp_path / "weights.pt").items():
        torch.testing.assert_close(weight, expected[name].data, atol=1e-12, rtol=0)
