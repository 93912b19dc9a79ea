"""The timeout of the groups that lessons make for a mesh of all ranks, and when FSDP gathers.

What FSDP holds and sends is in test_readme.py, test_watch.py and test_pictures.py.
"""

import argparse
import importlib
from datetime import timedelta
from unittest import mock

import fully_sharded_data_parallel as lesson
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from common.models import MODELS
from watching.messages import Messages
from watching.ranks import call

MESHES = {  # lessons that make a mesh of all ranks, and how they are called
    "fully_sharded_data_parallel": lambda lesson, args: lesson.shard(MODELS["mlp"](), args),
    "fully_sharded_checkpoints": lambda lesson, args: lesson.shard(MODELS["mlp"](), args),
    "fully_sharded_export": lambda lesson, args: lesson.shard(MODELS["mlp"](), args),
    "sharded_muon": lambda lesson, args: lesson.shard(MODELS["mlp"](), args),
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
    call(timeouts_beside_unused_gpus, 1)


ALL = argparse.Namespace(device="cpu", timeout=60, keep_weights=False)


def gather_from_pairs(rank):
    """Exercise 4: with reshard_after_forward=2, backward() gathers from two ranks of four."""

    def in_pairs(module, reshard_after_forward=None, **options):
        return fully_shard(module, reshard_after_forward=reshard_after_forward and 2, **options)

    model = MODELS["mlp"]()
    with mock.patch.object(lesson, "fully_shard", in_pairs):
        lesson.shard(model, ALL)
    with Messages() as messages:
        loss = model(torch.randn(3, 1, 28, 28)).sum()
        forward = messages.of("all_gather")
        loss.backward()
    backward = messages.of("all_gather")[4:]
    assert [each.sent / each.nbytes for each in forward] == [3] * 4  # to so many other ranks
    assert [each.sent / each.nbytes for each in backward] == [1] * 4
    if rank == 0:
        assert sum(each.nbytes for each in forward) == 59_340
        assert sum(each.nbytes for each in backward) == 118_680


def test_layers_gathered_from_pairs():
    """The bytes of answers.md."""
    call(gather_from_pairs, 4)
