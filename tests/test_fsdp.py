"""The FSDP lesson: what rank 0 holds, messages, timeouts, and what goes wrong in silence.

The functions without "test" in their names run on ranks, or help them.
"""

import argparse
import importlib
from collections import Counter
from datetime import timedelta
from unittest import mock

import fully_sharded_data_parallel
import pytest
import torch
import torch.distributed as dist
from forked import in_group
from test_sharding_by_hand import held
from torch.nn import functional as F

from common.models import MODELS
from figures.messages import Messages


def sharded(seed=0, keep_weights=False):
    """Return an MLP that the lesson has sharded, and one with the same numbers that is whole."""
    models = []
    for _ in range(2):
        torch.manual_seed(seed)
        models.append(MODELS["mlp"]())
    args = argparse.Namespace(device="cpu", timeout=60, keep_weights=keep_weights)
    fully_sharded_data_parallel.shard(models[0], args)
    return models


def loss_of(model):
    """Return the loss of this rank's images."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(8, 1, 28, 28, generator=generator)
    return F.cross_entropy(model(images), torch.arange(8))


def step_of(rank, keep_weights):
    """Count the messages of a step, and what a rank holds after a step and a test."""
    model, whole = sharded(keep_weights=keep_weights)
    optimizer = torch.optim.Adam(model.parameters())
    with Messages() as messages:
        loss_of(model).backward()
    kinds = Counter(message.kind for message in messages.noted)
    assert kinds == {"all_gather": 4 if keep_weights else 8, "reduce_scatter": 4}
    optimizer.step()
    with torch.no_grad():
        loss_of(model)
    own = sum(each.chunk(3)[rank].nbytes for each in whole.parameters())
    assert held(fully_sharded_data_parallel.show_bytes, model, optimizer) == {
        "the parameters' shards": own,
        "whole layers": sum(each.nbytes for each in whole.parameters()) if keep_weights else 0,
        "gradients": own,
        "Adam's averages": 2 * own,
    }


@pytest.mark.parametrize("keep_weights", [False, True])
def test_messages_and_bytes(keep_weights):
    """Four layers are gathered twice, or once. A rank holds rows of each parameter, four times."""
    in_group(step_of, 3, keep_weights)


def optimizer_made_too_early(rank):
    """Exercise 1: its parameters get no gradients, so nothing moves."""
    model = MODELS["mlp"]()
    optimizer = torch.optim.Adam(model.parameters())
    args = argparse.Namespace(device="cpu", timeout=60, keep_weights=False)
    fully_sharded_data_parallel.shard(model, args)
    before = [each.full_tensor() for each in model.parameters()]
    loss_of(model).backward()
    optimizer.step()
    assert not optimizer.state
    for each, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(each.full_tensor(), old)


def seed_of_each_rank(rank):
    """Exercise 3: each rank keeps rows of the model that it has drawn itself."""
    model, _ = sharded(seed=rank)
    found = next(model.parameters()).full_tensor()
    for number, rows in enumerate(found.chunk(2)):
        torch.manual_seed(number)
        assert torch.equal(rows, next(MODELS["mlp"]().parameters()).chunk(2)[number])


@pytest.mark.parametrize("mistake", [optimizer_made_too_early, seed_of_each_rank])
def test_wrong_without_an_error(mistake):
    """What the docstring of the function says."""
    in_group(mistake, 2)


MESHES = {  # lessons that make a mesh of all ranks, and how they are called
    "fully_sharded_data_parallel": lambda lesson, args: lesson.shard(MODELS["mlp"](), args),
    "fully_sharded_checkpoints": lambda lesson, args: lesson.shard(MODELS["mlp"](), args),
    "tensor_parallel": lambda lesson, args: lesson.split_by_dtensor(MODELS["mlp"](), [], args),
    "activation_checkpointing": lambda lesson, args: lesson.shard(MODELS["mlp"](), args),
    "mixed_precision": lambda lesson, args: lesson.shard(MODELS["mlp"](), None, args),
}


def timeouts_beside_unused_gpus(rank):
    """Make the meshes of CPUs as on a machine with GPUs, where they have groups of their own."""
    make_mesh = dist.init_device_mesh
    groups = []

    def make_beside_gpus(*args):
        with mock.patch("torch.cuda.is_available", return_value=True):
            mesh = make_mesh(*args)
        groups.append(mesh.get_group())
        return mesh

    args = argparse.Namespace(device="cpu", timeout=7, keep_weights=False, double=False)
    with mock.patch.object(dist, "init_device_mesh", make_beside_gpus):
        for name, call in MESHES.items():
            call(importlib.import_module(name), args)
            group = groups.pop()
            assert group is not dist.group.WORLD
            options = group._get_backend(torch.device("cpu")).options
            assert options._timeout == timedelta(seconds=7), name


def test_timeouts_beside_unused_gpus():
    """--timeout holds for the group of the mesh, too, which would have one of half an hour."""
    in_group(timeouts_beside_unused_gpus, 1)
