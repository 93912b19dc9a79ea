"""A model that is split or sharded, saved, overwritten with zeros and loaded: it is as it was.

Otherwise its state_dict() is refused, because a checkpoint would lose shards without an error.
"""

import argparse
import copy
from datetime import timedelta

import expert_parallel
import four_axes
import manual_fully_sharded
import manual_pipeline
import pipeline_parallel
import pytest
import sequence_parallel
import sharded_optimizer
import tensor_parallel
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import vocabulary_parallel
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from common.models import make_layers, make_model
from common.transformer import Block
from watch_ranks.ranks import call

CPU = torch.device("cpu")


def flags(model="mlp", **others):
    """Return the flags of a small model. Its vocabulary is the 256 bytes."""
    sizes = {"width": 16, "layers": 4} if model == "mlp" else {"width": 32, "layers": 2, "heads": 8}
    sizes |= {"double": False, "device": "cpu", "timeout": 60}
    return argparse.Namespace(model=model, **(sizes | others))


def by_tensor(by):
    """Split an MLP."""
    args = flags()
    model = make_model(args)
    pairs = tensor_parallel.find_pairs(model)
    if by == "hand":
        tensor_parallel.split(model, pairs)
    else:
        tensor_parallel.split_by_dtensor(model, pairs, args)
    return model


def by_sequence(by):
    """Split a transformer and its tokens."""
    model = make_model(flags("transformer"))
    if by == "hand":
        sequence_parallel.split_by_hand(model, group=None)
    else:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        sequence_parallel.split_by_dtensor(model, mesh)
    return model


def by_vocabulary(by):
    """Split the vocabulary of a language model, whose embedding is the output layer's, too."""
    model = make_model(flags("language", tied=True))
    if by == "hand":
        vocabulary_parallel.split_vocabulary(model, group=None)
    else:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        vocabulary_parallel.split_vocabulary_by_dtensor(model, mesh)
    return model


def by_axes(mesh):
    """Split a language model along the axes of a mesh."""
    args = flags("language", batch_size=8, micro_batches=4, mesh=mesh)
    meshes = four_axes.make_meshes(mesh, CPU, timedelta(seconds=60))
    return four_axes.wrap(make_layers(args), *meshes, CPU, args)


def by_experts(count):
    """Give each rank some of the experts of a transformer."""
    model = make_model(flags("transformer"))
    for layer in model.layers:
        if isinstance(layer, Block):
            layer.mlp = expert_parallel.Mixture(layer.mlp, count, top=1, group=None)
    return model


def by_stages(name):
    """Give each rank a stage of an MLP, or two, of the schedule of this name; None: by hand."""
    layers = make_layers(flags(layers=7))
    if name:
        return pipeline_parallel.make_other(name, layers, CPU, 4)
    stage, shapes = manual_pipeline.make_stage(layers, dist.get_rank(), torch.zeros(1, 28, 28))
    return manual_pipeline.Pipeline(stage, shapes, [], None)


def trained(make, *what):
    """Return a model and Adam after a step. Replicas have equal gradients."""
    torch.manual_seed(0)
    model = make(*what)
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def local_tensors(model, optimizer):
    """Return what this rank has of all parameters and of Adam's averages."""
    tensors = list(model.parameters())
    for averages in optimizer.state.values():
        tensors += [averages["exp_avg"], averages["exp_avg_sq"]]
    assert len(tensors) == 3 * len(list(model.parameters()))
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def overwritten(model, optimizer):
    """Return copies of a rank's tensors, and overwrite these with zeros."""
    right = copy.deepcopy([tensor.detach() for tensor in local_tensors(model, optimizer)])
    for tensor in local_tensors(model, optimizer):
        tensor.detach().zero_()
    return right


def saved_and_loaded(_, folder, make, *what):
    """Save with torch.distributed.checkpoint, and load."""
    model, optimizer = trained(make, *what)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    right = overwritten(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    states = {"model_state_dict": model_state, "optim_state_dict": optimizer_state}
    set_state_dict(model, optimizer, **states)
    torch.testing.assert_close(local_tensors(model, optimizer), right, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (by_tensor, "dtensor"),
        (by_sequence, "dtensor"),
        (by_vocabulary, "dtensor"),
        (by_axes, "1x4x1x1"),
        (by_axes, "4x1x1x1"),
        (by_experts, 4),
        (by_stages, None),
        (by_stages, "Interleaved1F1B"),
        (by_stages, "ZBVZeroBubble"),
    ],
)
def test_what_is_saved_is_loaded(make, what, tmp_path):
    """All parameters and averages of each rank are as they were."""
    call(saved_and_loaded, 4, str(tmp_path / "saved"), make, what)


def refused(rank, folder, make, *what):
    """A state is refused, and what the error advises keeps each number."""
    model, optimizer = trained(make, *what)
    with pytest.raises(RuntimeError, match="split.*: torch.save .*model.parameters"):
        get_state_dict(model, optimizer)
    file = f"{folder}/rank{rank}.pt"
    torch.save({"model": [*model.parameters()], "optimizer": optimizer.state_dict()}, file)
    right = overwritten(model, optimizer)
    state = torch.load(file, weights_only=True)
    with torch.no_grad():
        for parameter, saved in zip(model.parameters(), state["model"], strict=True):
            parameter.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    torch.testing.assert_close(local_tensors(model, optimizer), right, atol=0, rtol=0)


@pytest.mark.parametrize("make", [by_tensor, by_sequence, by_vocabulary, by_axes])
def test_shards_made_by_hand(make, tmp_path):
    """A checkpoint would take them for replicas."""
    what = "1x2x1x2" if make is by_axes else "hand"
    call(refused, 4, tmp_path, make, what)


def a_folder_for_each_tp(rank, folder):
    """Save as four_axes.py advises."""
    model, _ = trained(by_axes, "2x1x1x2")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # the ranks with the same tp
    place = {"checkpoint_id": f"{folder}/{rank % 2}", "process_group": groups[rank % 2]}
    dcp.save(dict(model.named_parameters()), **place)
    right = [parameter.detach().to_local().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.detach().zero_()
    dcp.load(dict(model.named_parameters()), **place)
    found = [parameter.detach().to_local() for parameter in model.parameters()]
    torch.testing.assert_close(found, right, atol=0, rtol=0)


def test_a_folder_for_each_tp(tmp_path):
    """With two stages."""
    call(a_folder_for_each_tp, 4, tmp_path)


def refused_by_the_optimizers(_):
    """The shards of ZeRO 1 and 3 have no names, so their states are refused, too."""
    model = make_model(flags())
    optimizer = sharded_optimizer.ShardedOptimizer(model, torch.optim.Adam)
    with pytest.raises(RuntimeError, match="shard.*ZeroRedundancyOptimizer"):
        optimizer.optimizer.state_dict()
    model.state_dict()  # whole on each rank
    manual_fully_sharded.shard_layers(model)
    with pytest.raises(RuntimeError, match="sharded"):
        model.state_dict()


def test_zero_by_hand():
    """With two ranks."""
    call(refused_by_the_optimizers, 2)
