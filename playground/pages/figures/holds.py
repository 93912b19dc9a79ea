"""What one of four ranks holds, in each way of training."""

import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import hybrid_parallel
import manual_pipeline
import sharded_optimizer
import tensor_parallel
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from common.models import MLP
from figures.counting import (
    MICRO_BATCHES,
    WIDTH,
    forward_and_backward,
    in_memory,
    of_all_ranks,
    random_batch,
    two_rows,
)
from figures.fsdp import shard
from figures.style import BLUE, GREEN, GREY, ORANGE, PINK, add_legend, box, new_figure, save
from watching.messages import Operations, flat

RANKS = 4


def count() -> dict[str, list[dict[str, int]]]:
    """Train two steps in each way, and count the bytes that each rank holds in the second one.

    Gradients are counted when backward() has ended. Activations are what autograd saves for
    backward(), including the images. In the pipeline, which is GPipe, they are those of all
    micro-batches, because no backward pass starts before the last forward pass.

    Returns:
        For each way a dict for each rank: "parameters", "gradients", "Adam's averages",
        "activations" and "buffers".
    """
    ways = {
        "one process": _one_process,
        "DDP": _ddp,
        "ZeRO 1": _zero,
        "HSDP": _hsdp,
        "FSDP": _fsdp,
        "tensor": _tensor,
        "pipeline": _pipeline,
    }
    bytes_of = {}
    for name, prepare in ways.items():
        images, labels = random_batch(512)
        model = MLP(WIDTH, layers=8)
        trained, optimizer, compute = prepare(model, images, labels)
        compute()  # in the first step, DDP makes other buckets, and FSDP gathers more
        optimizer.step()
        optimizer.zero_grad()
        bytes_of[name] = of_all_ranks(_count_step(trained, optimizer, compute))
    return bytes_of


class Buffers(Operations):
    """While this is active, it notes the buffers that are in memory at each message.

    A buffer is what a message sends or receives, or a parameter that FSDP has gathered.

    Args:
        model: what this rank trains.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self._seen = set()  # weak references, which do not keep memory from being freed
        self._moments = []  # for each message the bytes of what is in memory, by reference

    def after(self, operation: Any, args: tuple, result: Any) -> None:
        """Note the buffers, if this was a message, or a wait for one."""
        if "c10d" in operation.namespace:
            tensors = flat([args, result])
            tensors += [_local(parameter) for parameter in self.model.parameters()]
            self._seen |= _storages(tensors)
            del tensors
            self._moments.append(in_memory(self._seen))

    def most(self, others: list[Tensor]) -> int:
        """Return the bytes of all buffers at the moment when there were most.

        Args:
            others: these tensors are no buffers.
        """
        no_buffers = _storages(others)
        most = 0
        for sizes in self._moments:
            buffers = [size for reference, size in sizes.items() if reference not in no_buffers]
            most = max(most, sum(buffers))
        return most


def _storages(tensors: list[Tensor]) -> set[weakref.ref]:
    """Return references to the memory behind tensors."""
    return {weakref.ref(tensor.untyped_storage()) for tensor in tensors}


def _count_step(model: nn.Module, optimizer: Any, compute: Callable) -> dict[str, int]:
    """Run a step, and return the bytes that this rank holds."""
    saved = {}

    def note(tensor):
        storage = _local(tensor).untyped_storage()
        saved[storage.data_ptr()] = storage
        return tensor

    adam = getattr(optimizer, "optimizer", optimizer)  # stage 1 of ZeRO has one inside
    buffers = Buffers(model)
    with buffers:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            compute()
        parameters = [*model.parameters()]
        for group in adam.param_groups:
            parameters += group["params"]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        optimizer.step()
    parameters = [_local(parameter) for parameter in parameters]
    gradients = [_local(gradient) for gradient in gradients]
    # Autograd saves parameters as well. FSDP has freed those that it had gathered.
    for parameter in parameters:
        saved.pop(parameter.untyped_storage().data_ptr(), None)
    activations = [torch.tensor([]).set_(storage) for storage in saved.values()]
    state = []
    for averages in adam.state.values():
        state += averages.values()
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(gradients),
        "Adam's averages": _bytes(_local(tensor) for tensor in state),
        "activations": _bytes(activations),
        "buffers": buffers.most([*parameters, *gradients, *activations]),
    }


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes that tensors keep in memory.

    A tensor keeps the whole storage behind it, and a storage of several tensors counts once.
    """
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _local(tensor: Tensor | None) -> Tensor | None:
    """Return what this rank has of a tensor."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def _adam(parameters: Any) -> torch.optim.Adam:
    """Return the optimizer of the lessons."""
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-6, fused=True)


def _per_rank_batch(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of a batch, for data parallelism."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    return images[rank::world_size].contiguous(), labels[rank::world_size]


def _one_process(model, images, labels):
    """The loop of one process, without messages unless the model sends some."""
    compute = partial(forward_and_backward, model, images, labels)
    return model, _adam(model.parameters()), compute


def _ddp(model, images, labels):
    """Each rank has the whole model, and its part of the images."""
    batch = _per_rank_batch(images, labels)
    compute = partial(forward_and_backward, DistributedDataParallel(model), *batch)
    return model, _adam(model.parameters()), compute


def _zero(model, images, labels):
    """Adam's averages are sharded: stage 1 of ZeRO."""
    optimizer = sharded_optimizer.ShardedOptimizer(model, _adam)
    compute = partial(forward_and_backward, model, *_per_rank_batch(images, labels))
    return model, optimizer, compute


def _fsdp(model, images, labels):
    """All of the model is sharded, as in fully_sharded_data_parallel.py: stage 3 of ZeRO."""
    shard(model, keep_weights=False)
    return _one_process(model, *_per_rank_batch(images, labels))


def _pipeline(model, images, labels):
    """A stage for each rank, with GPipe, as manual_pipeline.py has it."""
    layers = nn.Sequential(*model.stage1, *model.stage2)
    rank = dist.get_rank()
    stage, shape = manual_pipeline.make_stage(layers, rank, images[0])
    passes = manual_pipeline.gpipe(rank, dist.get_world_size(), MICRO_BATCHES)
    pipeline = manual_pipeline.Pipeline(stage, shape, passes, timedelta(seconds=60))
    return stage, _adam(stage.parameters()), partial(pipeline, images, labels)


def _tensor(model, images, labels):
    """Pairs of layers are split by hand, as in tensor_parallel.py. All ranks have all images."""
    tensor_parallel.split(model, tensor_parallel.find_pairs(model))
    return _one_process(model, images, labels)


def _hsdp(model, images, labels):
    """FSDP along the rows of a mesh, replicas along its columns (hybrid_parallel.py)."""
    hybrid_parallel.shard(model, two_rows(("replicate", "shard")))
    return _one_process(model, *_per_rank_batch(images, labels))


def draw(counts: dict, path: Path) -> None:
    """Draw a bar for each way: what the rank that holds most holds."""
    colours = {"parameters": BLUE, "gradients": ORANGE, "Adam's averages": GREEN}
    colours |= {"activations": PINK, "buffers": GREY}
    names = {"one process": "one process, alone", "HSDP": "HSDP, 2 x 2", "FSDP": "FSDP (ZeRO 3)"}
    names |= {"tensor": "tensor parallel"}
    totals = {}
    for way, ranks in counts.items():
        totals[way] = max(sum(held.values()) for held in ranks) / 1e6
    title = "One of four ranks holds {DDP:.0f} MB with DDP, and {FSDP:.0f} with FSDP"
    figure, [[axes]] = new_figure(title.format(**totals), 1, 1, 4.6)
    for place, (way, ranks) in enumerate(counts.items()):
        held = max(ranks, key=lambda each: sum(each.values()))
        end = 0.0
        for kind, colour in colours.items():
            width = held[kind] / 1e6
            box(axes, (end, -place - 0.35), (width, 0.7), colour)
            end += width
        axes.text(end + 1, -place, f"{totals[way]:.0f}", va="center", weight="bold")
    texts = [names.get(way, way) for way in counts]
    axes.set_yticks([-place for place in range(len(counts))], texts)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0.5 - len(counts), 0.5)
    axes.set_xlim(0, 112)
    axes.set_xlabel("MB")
    add_legend(figure, colours, columns=3)
    save(figure, path)
