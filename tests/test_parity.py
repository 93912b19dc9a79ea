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
from conftest import DIGITS, SHORT, epochs, run, single_gpu, talks, train
from forked import in_group
from lessons import LESSONS
from parameters import largest_difference
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common.models import MODELS

pytestmark = pytest.mark.quick
# Flags of a lesson, and the numbers of processes; None: it takes none. The last run of a lesson
# trains a transformer, and the runs before it the MLP.
VARIANTS = {
    "data_parallel": {(): (None,), ("--by", "hand"): (3,)},
    "manual_data_parallel": {(): (3,), ("--bucket",): (1,)},
    "overlapped_data_parallel": {(): (3,), ("--by", "each"): (1,)},
    "distributed_data_parallel": {(): (3, 1)},
    "distributed_data_parallel2": {(): (3, 1)},
    "distributed_data_parallel_torchrun": {(): (3, 1)},
    "distributed_data_parallel_resumable": {(): (3, 1)},
    "model_parallel": {(): (None,), ("--pipelined", "--micro_batches", 7): (None,)},
    "manual_pipeline": {(): (1,), ("--schedule", "1F1B"): (3,)},
    "pipeline_parallel": {
        (): (1,),
        ("--schedule", "InterleavedZeroBubble"): (2,),
        ("--schedule", "1F1B"): (3,),
    },
    "sharded_optimizer": {(): (3, 1)},
    "manual_fully_sharded": {("--keep_weights",): (1,), (): (3,)},
    "fully_sharded_data_parallel": {("--meta",): (3,), ("--keep_weights",): (1,), (): (3,)},
    "fully_sharded_checkpoints": {(): (3, 1)},
    "tensor_parallel": {(): (1, 4)},  # it does not split the transformer
    "hybrid_parallel": {(): (1,), ("--kind", "hsdp", "--mesh", "1x3"): (3,)},
    "profile_steps": {("--average", "bucket"): (3,), ("--average", "each"): (2,)},
}
OF_TRANSFORMERS = {  # lessons that train the transformer only
    "mixed_precision": {("--precision", "full"): (1,), ("--precision", "full", "--sharded"): (3,)},
    "activation_checkpointing": {(): (1,), ("--checkpoint", "second", "--sharded"): (3,)},
    "sequence_parallel": {(): (1,), ("--sequence",): (4,), ("--by", "dtensor"): (2,)},
    "context_parallel": {(): (1, 3), ("--by", "ulysses"): (4,)},
    "expert_parallel": {("--experts", 1): (1,)},  # with more experts it is another model
    "three_axes": {(): (1,), ("--mesh", "1x3x1", "--fsdp"): (3,)},
}
MODEL = {"mlp": (*DIGITS, "--batch_size", 120, "--epochs", 2)}  # flags that select a model
MODEL["transformer"] = (*MODEL["mlp"], "--model", "transformer", "--tokens", 8, "--width", 16)
NO_PARITY = {"distributed_data_parallel_resnet"}  # because of batch norm
FLAT_SHARDS = {"sharded_optimizer", "manual_fully_sharded"}


def cases():
    """Return what is trained: (lesson, flags, processes, model)."""
    found = []
    for lesson, variants in (VARIANTS | OF_TRANSFORMERS).items():
        runs = [(flags, count) for flags, counts in variants.items() for count in counts]
        for each in runs:
            last = each == runs[-1] and lesson != "tensor_parallel"
            model = "transformer" if last or lesson in OF_TRANSFORMERS else "mlp"
            found.append((lesson, *each, model))
    return found


def with_parameters(lesson, *flags, folder, processes=None):
    """Run a lesson in float64. Its ranks write their parameters to the folder.

    Returns the epoch lines.
    """
    if lesson == "distributed_data_parallel_resumable":
        flags += ("--run_dir", folder / "run")
    if lesson == "profile_steps":
        flags += ("--out", folder / "traces")
    env = {"PARAMETERS": str(folder)}
    return epochs(train(lesson, "--double", *flags, processes=processes, env=env).stdout)


@functools.cache
def expected_parameters(model):
    """Return the parameters of single_gpu.py in float64, which runs only once for each model."""
    with tempfile.TemporaryDirectory() as folder:
        with_parameters("single_gpu", *MODEL[model], folder=Path(folder))
        return torch.load(Path(folder) / "rank0.pt")


def test_all_training_lessons_are_here():
    """A lesson that trains has parity, or a reason why it can't."""
    training = {lesson for lesson in LESSONS if not talks(lesson)} - {"single_gpu"}
    assert training == VARIANTS.keys() | OF_TRANSFORMERS.keys() | NO_PARITY


@pytest.mark.parametrize(("lesson", "flags", "processes", "model"), cases())
def test_float64(lesson, flags, processes, model, tmp_path, record_property):
    """All variants: the same losses, accuracies and parameters."""
    flags = (*MODEL[model], *flags)
    lines = with_parameters(lesson, *flags, folder=tmp_path, processes=processes)
    right = single_gpu(*MODEL[model], "--double")
    assert lines == [line | {"loss": pytest.approx(line["loss"], abs=1e-10)} for line in right]
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
    train("distributed_data_parallel", *SHORT, "--model", "cnn", "--savefile", path, processes=2)
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


def test_the_flags_matter():
    """Parity would mean nothing if every run gave the same numbers whatever it was told.

    With --double, the losses are those of float32, with more digits.
    """
    right = single_gpu(*MODEL["mlp"], "--double")[-1]["loss"]
    assert single_gpu(*MODEL["mlp"])[-1]["loss"] == pytest.approx(right, abs=2e-4)
    assert round(right, 4) != right
    for flags in (("--lr", 2e-3), ("--seed", 1), ("--batch_size", 60)):
        assert abs(single_gpu(*MODEL["mlp"], *flags)[-1]["loss"] - right) > 1e-3, flags


def resnet_rank(rank):
    """Train with the lesson's own run_epoch, and as all ranks, one piece of a batch at a time."""
    import distributed_data_parallel_resnet as lesson

    torch.manual_seed(0)
    norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
    model = nn.Sequential(*norm, nn.Flatten(), nn.Linear(4 * 6 * 6, 10)).double()
    alone = copy.deepcopy(model)
    images = torch.randn(2, 3, 7, 3, 8, 8).double()  # two steps, three ranks, seven images each
    labels = torch.randint(10, (2, 3, 7))
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
    step = functools.partial(lesson.update, wrapped, optimizer, 2)
    share = list(zip(images[:, rank], labels[:, rank], strict=True))
    lesson.run_epoch(wrapped, share, torch.device("cpu"), step)
    optimizer = torch.optim.Adam(alone.parameters(), lr=1e-3, eps=1e-6)
    for ranks in zip(images, labels, strict=True):
        optimizer.zero_grad()
        for batch in zip(*ranks, strict=True):
            pieces = [part.tensor_split(2) for part in batch]
            for piece_images, piece_labels in zip(*pieces, strict=True):
                loss = F.cross_entropy(alone(piece_images), piece_labels, reduction="sum")
                (loss / (3 * 7)).backward()
        optimizer.step()
    for parameter, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter, right, atol=1e-12, rtol=0)


def test_batch_norm_and_accumulation_as_in_one_process():
    """DDP, pieces of unequal length and no_sync change nothing but rounding: 1e-12 in float64."""
    in_group(resnet_rank, 3)
