"""The FSDP lesson: what rank 0 holds, the exercises, and what goes wrong in silence.

The functions without "test" in their names run on two ranks. Some show what PyTorch's own classes
do without an error, as troubleshooting.md says.
"""

import argparse
import importlib
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import DIGITS, epochs, losses, single_gpu, train
from forked import in_group
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from common.models import MODELS

LESSON = "fully_sharded_data_parallel"
TWO_EPOCHS = (*DIGITS, "--batch_size", 120, "--epochs", 2)
LABELS = torch.arange(8)
GATHERS = "c10d._allgather_base_"
REDUCES = "c10d._reduce_scatter_base_"


def held(out):
    """Return the bytes that rank 0 holds, by the names that the lesson prints."""
    found = re.findall(r"^rank 0 holds +([\d,]+) bytes of (.+)$", out, re.M)
    return {name: int(number.replace(",", "")) for number, name in found}


@pytest.mark.parametrize(("processes", "keep"), [(3, False), (2, True)])
def test_the_bytes_that_rank_0_holds(processes, keep):
    """Its rows of each parameter, as many gradients, twice as much in Adam, and whole layers."""
    flags = (*TWO_EPOCHS, "--epochs", 1, *["--keep_weights"] * keep)
    parameters = list(MODELS["mlp"]().parameters())
    own = sum(each.chunk(processes)[0].nbytes for each in parameters)
    whole = sum(each.nbytes for each in parameters)
    assert held(train(LESSON, *flags, processes=processes).stdout) == {
        "the parameters' shards": own,
        "whole layers": whole if keep else 0,
        "gradients": own,
        "Adam's averages": 2 * own,
    }


def test_an_optimizer_made_too_early(change):
    """Exercise 1: its parameters get no gradients, so nothing moves, without an error."""
    made = (
        "    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)\n"
    )
    shard = "        shard(model, args)  # NEW: this also moves"
    copy = change(LESSON, (made, ""), (shard, f"    {made}{shard}"))
    out = train(copy, *TWO_EPOCHS, processes=2).stdout
    first, second = epochs(out)
    assert second["test"] == first["test"]
    assert second["loss"] == pytest.approx(first["loss"], abs=0.01)
    assert held(out)["Adam's averages"] == 0


def test_only_the_whole_model_is_sharded(change):
    """Exercise 2: the numbers are right, but the model stays whole after a test."""
    copy = change(LESSON, ("    for layer in model.layers:  #", "    for layer in []:  #"))
    out = train(copy, *TWO_EPOCHS, processes=2).stdout
    expected = [line["loss"] for line in single_gpu(*TWO_EPOCHS)]
    assert losses(out) == pytest.approx(expected, abs=2e-4)
    assert held(out)["whole layers"] == 236_840
    assert held(out)["the parameters' shards"] == 118_420


def sharded(seed=0, keep_weights=False):
    """Return an MLP that the lesson has sharded."""
    import fully_sharded_data_parallel as lesson

    torch.manual_seed(seed)
    model = MODELS["mlp"]()
    lesson.shard(model, argparse.Namespace(device="cpu", timeout=60, keep_weights=keep_weights))
    return model


def images_of(rank):
    """Return the images of a rank, (8, 1, 28, 28)."""
    return torch.randn(8, 1, 28, 28, generator=torch.Generator().manual_seed(rank))


def counted(model):
    """Return how many messages a rank sends in a step, by their kind."""
    with CommDebugMode() as messages:
        F.cross_entropy(model(images_of(0)), LABELS).backward()
    return {str(name): count for name, count in messages.get_comm_counts().items()}


def messages_of_a_step(rank):
    """Four layers are gathered twice, or once, and each gets its gradients in one message.

    There is no no_sync(). set_requires_gradient_sync(False) leaves out only reduce_scatter.
    """
    assert counted(sharded(keep_weights=True)) == {GATHERS: 4, REDUCES: 4}
    model = sharded()
    assert not hasattr(model, "no_sync")
    model.set_requires_gradient_sync(False)
    assert counted(model) == {GATHERS: 8}
    model.set_requires_gradient_sync(True)
    assert counted(model) == {GATHERS: 8, REDUCES: 4}


def buckets_of_ddp(rank):
    """The first bucket has at least 1 MiB, so 8 MiB of gradients are two messages."""
    layers = [nn.Linear(784, 784) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), *layers))
    counted(model)  # DDP chooses the buckets after the first step
    assert counted(model)["c10d.allreduce_"] == 2


def a_seed_for_each_rank(rank):
    """Exercise 3: each rank keeps rows of the model that it has drawn itself."""
    first = next(sharded(seed=rank).parameters()).full_tensor()
    for number, rows in enumerate(first.chunk(2)):
        torch.manual_seed(number)
        assert torch.equal(rows, next(MODELS["mlp"]().parameters()).chunk(2)[number])


def parameters_made_on_the_meta_device(rank):
    """On a CPU, equal seeds draw the same rows on all ranks."""
    with torch.device("meta"):
        model = MODELS["mlp"]()
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,)))
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    assert torch.equal(*next(model.parameters()).full_tensor().chunk(2))


def forward_without_hooks(rank):
    """forward() skips the hooks that gather."""
    model = fully_shard(MODELS["mlp"](), mesh=dist.init_device_mesh("cpu", (2,)))
    with pytest.raises(RuntimeError, match="got mixed torch.Tensor and DTensor"):
        model.forward(images_of(rank))


def state_that_is_asked_for_too_early(rank):
    """Before the first step, Adam counts one that it never made. Before step(), there is none."""
    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    assert {state["step"].item() for state in optimizer.state.values()} == {1}
    optimizer = torch.optim.Adam(model.parameters())
    counted(model)  # has a backward()
    assert not get_optimizer_state_dict(model, optimizer)["state"]


def norm_of_all_ranks(rank):
    """full_tensor() has it. The shards of one rank have less."""
    model = sharded()
    F.cross_entropy(model(images_of(rank)), LABELS).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor()
    gradients = [parameter.grad for parameter in model.parameters()]
    whole = torch.stack([each.full_tensor().norm() for each in gradients]).norm()
    shards = torch.stack([each.to_local().norm() for each in gradients]).norm()
    torch.testing.assert_close(norm, whole)
    assert shards < 0.95 * norm


def tied_parameters(rank):
    """In two groups they are refused, with the cure; in one they work."""
    mesh = dist.init_device_mesh("cpu", (2,))
    models = []
    for _ in range(2):
        layers = nn.Flatten(), nn.Linear(784, 784), nn.Linear(784, 784)
        layers[2].weight = layers[1].weight
        models.append(nn.Sequential(*layers))
    for group in ([models[0][1], models[0][2]], models[1][1], models[1][2], *models):
        fully_shard(group, mesh=mesh)
    models[0](images_of(rank))
    with pytest.raises(ValueError, match=r"fully_shard\(\[module_a, module_b\]\)"):
        models[1](images_of(rank))


def batch_norm_in_bfloat16(rank):
    """Its buffers stay in float32, which is an error on a CPU; a policy of its own helps."""
    mesh = dist.init_device_mesh("cpu", (2,))
    narrow = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    wide = MixedPrecisionPolicy(torch.float32, torch.float32, torch.bfloat16)
    for policy in (narrow, wide):
        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
        fully_shard(model[2], mesh=mesh, mp_policy=policy)
        for layer in (model[1], model[3], model):
            fully_shard(layer, mesh=mesh, mp_policy=narrow)
        if policy == wide:
            model(images_of(rank))
        else:
            with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
                model(images_of(rank))


@pytest.mark.parametrize(
    "function",
    [
        messages_of_a_step,
        buckets_of_ddp,
        a_seed_for_each_rank,
        parameters_made_on_the_meta_device,
        forward_without_hooks,
        state_that_is_asked_for_too_early,
        norm_of_all_ranks,
        tied_parameters,
        batch_norm_in_bfloat16,
    ],
)
def test_on_two_ranks(function):
    """What the docstring of the function says."""
    in_group(function, 2)


def waiting_rank(rank, name):
    """Compute alone on rank 0, with the group that a mesh has beside GPUs that are not used."""
    lesson = importlib.import_module(name)
    store = dist.distributed_c10d._get_default_store()
    make_mesh = dist.init_device_mesh

    def make_beside_gpus(*args):
        with mock.patch("torch.cuda.is_available", return_value=True):
            mesh = make_mesh(*args)
        assert mesh.get_group() is not dist.group.WORLD
        return mesh

    model = MODELS["mlp"]()
    args = argparse.Namespace(device="cpu", timeout=2, keep_weights=False)
    with mock.patch.object(dist, "init_device_mesh", make_beside_gpus):
        if name == "tensor_parallel":
            lesson.split_by_dtensor(model, lesson.find_pairs(model), args)
        else:
            lesson.shard(model, args)
    if rank == 1:
        store.wait(["rank 0 has ended"], timedelta(seconds=200))
    else:
        with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
            model(images_of(0))
        store.set("rank 0 has ended", "")


@pytest.mark.parametrize("lesson", [LESSON, "fully_sharded_checkpoints", "tensor_parallel"])
def test_a_rank_that_does_nothing_beside_unused_gpus(lesson):
    """--timeout holds for the group of the mesh, too.

    On a machine with GPUs, a mesh of CPUs has a group of its own, with a timeout of half an hour.
    """
    in_group(waiting_rank, 2, lesson)
