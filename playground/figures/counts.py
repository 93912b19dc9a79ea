"""What the pictures of pictures.py show: counted, or timed, while functions of the lessons run.

in_ranks() starts the ranks. All other public functions except time_overlap() are called on each
rank of a process group on CPUs, and return the same on all ranks: numbers and texts that JSON can
hold.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLAYGROUND = Path(__file__).resolve().parents[1]
for part in ("", "sharded", "split", "transformer"):
    sys.path.append(str(PLAYGROUND / part))  # find the lessons
sys.path.append(str(PLAYGROUND.parent))  # find common/
import blocking_p2p
import context_parallel
import fully_sharded_data_parallel
import hybrid_parallel
import manual_pipeline
import nonblocking_p2p
import pipeline_parallel
import sharded_optimizer
import tensor_parallel
import three_axes

from common.models import MLP, TOKENS, Transformer
from figures.attention import count_context, count_split
from figures.experts import count_experts
from figures.memory import Gathered, held
from figures.messages import Messages
from figures.ranks import of_all_ranks
from figures.replicas import count_data_parallel
from figures.timeline import METHODS, Calls, note_calls
from figures.traces import named, whole_steps

CPU = torch.device("cpu")
MICRO_BATCHES = 8
WIDTH = 784  # as many neurons as an image has pixels, so all layers but the last one are equal


def in_ranks(functions: dict[str, Callable[[], Any]], world_size: int) -> dict[str, Any]:
    """Call functions on each rank of a new process group. Returns what they return on rank 0.

    Args:
        functions: by name. They are called one after the other.
        world_size: number of ranks, which are processes on this machine.
    """
    with mp.Manager() as manager:
        results = manager.dict()
        with socket.create_server(("127.0.0.1", 0)) as server:  # a port that is free now
            port = server.getsockname()[1]
        mp.spawn(_call, (functions, world_size, port, results), world_size)
        return dict(results)


def _call(rank: int, functions: dict, world_size: int, port: int, results: dict) -> None:
    """Call the functions as one of the ranks."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    for name, function in functions.items():
        torch.manual_seed(0)
        result = function()
        if rank == 0:
            results[name] = result
    dist.destroy_process_group()


def _batch(size: int) -> tuple[Tensor, Tensor]:
    """Return random images, (size, 1, 28, 28), and labels, int64 (size,)."""
    return torch.rand(size, 1, 28, 28), torch.randint(10, (size,))


def _forward_and_backward(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Compute the gradients of a batch."""
    F.cross_entropy(model(images), labels).backward()


# What each rank holds


def count_memory() -> dict[str, list[dict[str, int]]]:
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
        images, labels = _batch(512)
        model = MLP(WIDTH, layers=8)
        trained, optimizer, compute = prepare(model, images, labels)
        compute()  # in the first step, DDP makes other buckets, and FSDP gathers more
        optimizer.step()
        optimizer.zero_grad()
        bytes_of[name] = of_all_ranks(_count_step(trained, optimizer, compute))
    return bytes_of


class Buffers(TorchDispatchMode):
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

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """PyTorch calls this in place of each operation."""
        if DTensor in types:
            return NotImplemented  # PyTorch then turns it into operations on plain tensors
        result = operation(*args, **(kwargs or {}))
        if "c10d" in operation.namespace:
            tensors = [each for each in tree_leaves([args, result]) if isinstance(each, Tensor)]
            tensors += [_local(parameter) for parameter in self.model.parameters()]
            self._seen |= _storages(tensors)
            del tensors
            time.sleep(0.01)  # gloo's thread may hold a tensor for a moment after its message
            sizes = {}
            for reference in self._seen:
                storage = reference()
                if storage is not None:
                    sizes[reference] = storage.nbytes()
            self._moments.append(sizes)
        return result

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
        "parameters": held(parameters),
        "gradients": held(gradients),
        "Adam's averages": held(_local(tensor) for tensor in state),
        "activations": held(activations),
        "buffers": buffers.most([*parameters, *gradients, *activations]),
    }


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
    """Every rank does the same, without messages."""
    compute = partial(_forward_and_backward, model, images, labels)
    return model, _adam(model.parameters()), compute


def _ddp(model, images, labels):
    """Each rank has the whole model, and its part of the images."""
    batch = _per_rank_batch(images, labels)
    compute = partial(_forward_and_backward, DistributedDataParallel(model), *batch)
    return model, _adam(model.parameters()), compute


def _zero(model, images, labels):
    """Adam's averages are sharded: stage 1 of ZeRO."""
    optimizer = sharded_optimizer.ShardedOptimizer(model, _adam)
    compute = partial(_forward_and_backward, model, *_per_rank_batch(images, labels))
    return model, optimizer, compute


def _fsdp(model, images, labels):
    """All of the model is sharded, as in fully_sharded_data_parallel.py: stage 3 of ZeRO."""
    _shard(model, keep_weights=False)
    compute = partial(_forward_and_backward, model, *_per_rank_batch(images, labels))
    return model, _adam(model.parameters()), compute


def _shard(model, keep_weights):
    """Call shard() of fully_sharded_data_parallel.py."""
    flags = argparse.Namespace(device="cpu", keep_weights=keep_weights, timeout=60)
    fully_sharded_data_parallel.shard(model, flags)


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
    compute = partial(_forward_and_backward, model, images, labels)
    return model, _adam(model.parameters()), compute


def _hsdp(model, images, labels):
    """FSDP along the rows of a mesh, replicas along its columns (hybrid_parallel.py)."""
    hybrid_parallel.shard(model, _two_rows(("replicate", "shard")))
    compute = partial(_forward_and_backward, model, *_per_rank_batch(images, labels))
    return model, _adam(model.parameters()), compute


def _two_rows(names):
    """Return a mesh of all ranks with two rows."""
    return dist.init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)


# A ring all-reduce


def count_ring() -> dict[str, list]:
    """Add up a tensor with one number for each rank, by ring_all_reduce() of nonblocking_p2p.py.

    Returns:
        "sent": for each rank and step the number of the chunk that the rank sends.
        "held": for each rank, at the start and after each step, a text for each chunk, such as
            "013": it is the sum of the chunks of these ranks.
    """
    rank = dist.get_rank()
    # Bit r of a chunk says whether the chunk of rank r has been added.
    numbers = torch.full((dist.get_world_size(),), 2.0**rank)
    sent = []
    held_chunks = []
    start_exchange = nonblocking_p2p.start_exchange

    def noted(mine, theirs, right, left):
        sent.append(mine.storage_offset())  # each chunk is one number
        held_chunks.append(_added_ranks(numbers))
        return start_exchange(mine, theirs, right, left)

    with mock.patch.object(nonblocking_p2p, "start_exchange", noted):
        nonblocking_p2p.ring_all_reduce(numbers)
    held_chunks.append(_added_ranks(numbers))
    return {"sent": of_all_ranks(sent), "held": of_all_ranks(held_chunks)}


def _added_ranks(numbers: Tensor) -> list[str]:
    """Return for each number the ranks whose bits are set in it."""
    texts = []
    for number in numbers.tolist():
        bits = f"{int(number):b}"[::-1]
        texts.append("".join(str(rank) for rank, bit in enumerate(bits) if bit == "1"))
    return texts


# FSDP over one step


def count_fsdp() -> dict:
    """Note which of eight layers are whole on a rank while each of them computes.

    Returns:
        "layers": the bytes of each layer's parameters, the first one first.
        "freed" and "kept" (with --keep_weights): a dict for each time at which a layer computes:
            "direction" ("forward" or "backward"), "computes" (the number of the layer, from 1),
            "whole" (the layers whose parameters are whole) and "buffer" (the bytes in which
            parameters arrive).
    """
    counts = {}
    for name, keep_weights in (("freed", False), ("kept", True)):
        model = MLP(WIDTH, layers=7)
        layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        counts["layers"] = []
        for layer in layers:
            counts["layers"].append(sum(parameter.nbytes for parameter in layer.parameters()))
        _shard(model, keep_weights)
        batch = _batch(8)
        _forward_and_backward(model, *batch)  # the first step gathers more
        counts[name] = _watch_layers(layers, partial(_forward_and_backward, model, *batch))
    return counts


def _watch_layers(layers: list[nn.Module], step: Callable) -> list[dict]:
    """Run a step, and note what is whole while each layer computes."""
    moments = []
    gathered = Gathered()

    def note(direction, number, *_):
        whole = []
        for other, layer in enumerate(layers, start=1):
            # A parameter is a DTensor, of which this rank has a shard, unless it is gathered.
            if not isinstance(layer.weight, DTensor):
                whole.append(other)
        moment = {"direction": direction, "computes": number, "whole": whole}
        moments.append(moment | {"buffer": gathered.gathered()})

    def note_later(number, layer, inputs, output):
        output.register_hook(partial(note, "backward", number))

    # These hooks come after those of FSDP: the layer is gathered when they run.
    for number, layer in enumerate(layers, start=1):
        layer.register_forward_pre_hook(partial(note, "forward", number))
        layer.register_forward_hook(partial(note_later, number))
    with gathered:
        step()
    return moments


# Tensor parallelism


def count_tensor() -> dict:
    """Split the MLP as tensor_parallel.py does, and note shapes and messages of its second pair.

    These are its last two layers. The first pair has no message in backward(), because the images
    need no gradient.

    Returns:
        "x" and "y": the shapes of the input and of the output.
        "ranks": for each rank the shapes of its "A", "x A" and "B".
        "forward" and "backward": how many all_reduces there are, and the bytes of their tensors.
    """
    model = MLP()
    tensor_parallel.split(model, tensor_parallel.find_pairs(model))
    column, _, row = model.stage2
    images, _ = _batch(128)
    inputs = model.stage1(images)
    with Messages() as forward:
        output = model.stage2(inputs)
    with Messages() as backward:
        output.sum().backward()
    shapes = {"A": list(column.weight.T.shape), "x A": list(column(inputs).shape)}
    shapes["B"] = list(row.weight.T.shape)
    counts = {"x": list(inputs.shape), "y": list(output.shape), "ranks": of_all_ranks(shapes)}
    for name, messages in (("forward", forward), ("backward", backward)):
        nbytes = sum(message.nbytes for message in messages.noted)
        counts[name] = [len(messages.noted), nbytes]
    return counts


# Schedules of a pipeline


def count_schedules() -> dict[str, list[str]]:
    """Note in which order each rank computes in a step of pipeline_parallel.py.

    Returns:
        For each schedule a text for each rank, in PyTorch's own notation: "4F0" is the forward pass
        of micro-batch 0 in stage 4. B is a backward pass. If it is split, I computes the gradient
        of the input, and W computes those of the parameters.
    """
    orders = {}
    for name, stages_per_rank in pipeline_parallel.STAGES_PER_RANK.items():
        model = MLP(16, layers=7)
        layers = nn.Sequential(*model.stage1, *model.stage2)
        parts = pipeline_parallel.cut(layers, dist.get_world_size() * stages_per_rank)
        pipeline = pipeline_parallel.Pipeline(parts, CPU, name, MICRO_BATCHES)
        images, labels = _batch(2 * MICRO_BATCHES)
        pipeline_parallel.connect(pipeline, [(images, labels)], CPU)
        marks = []
        for stage in pipeline.connected:
            for method, kind in METHODS.items():
                note_calls(stage, method, (stage.stage_index, kind), marks)
        pipeline(images, labels)
        orders[name] = of_all_ranks(_order(marks))
    return orders


def _order(marks: list[tuple]) -> str:
    """Return what a rank has computed, in PyTorch's notation."""
    split = set()
    for stage, kind, micro_batch in marks:
        if kind == "weights":
            split.add((stage, micro_batch))
    words = []
    for stage, kind, micro_batch in marks:
        letter = {"forward": "F", "backward": "B", "weights": "W"}[kind]
        if kind == "backward" and (stage, micro_batch) in split:
            letter = "I"
        words.append(f"{stage}{letter}{micro_batch}")
    return " ".join(words)


# A mesh


def count_mesh() -> list[dict]:
    """Count what each rank of hybrid_parallel.py sends in a step on a mesh with two rows.

    Returns:
        A dict for each picture: "kind", "images" (in the global batch), "mesh" (the ranks of each
        row), and "sent": for each axis the bytes that each rank sends.
    """
    pictures = []
    two_kinds = _two_rows(("dp", "tp"))
    for kind, images in (("tp", 128), ("tp", 1024), ("hsdp", 128)):
        model = MLP()
        if kind == "tp":
            mesh = two_kinds
            hybrid_parallel.split(model, mesh["tp"])
            hybrid_parallel.shard(model, mesh["dp"])
            batch = _batch(images // 2)
        else:
            mesh = _two_rows(("replicate", "shard"))
            hybrid_parallel.shard(model, mesh)
            batch = _batch(images // dist.get_world_size())
        _forward_and_backward(model, *batch)  # the first step gathers more
        with Messages() as messages:
            _forward_and_backward(model, *batch)
        sent = {}
        for axis in mesh.mesh_dim_names:
            own = round(messages.sent(group=mesh[axis].get_group().group_name))
            sent[axis] = of_all_ranks(own)
        picture = {"kind": kind, "images": images, "mesh": mesh.mesh.tolist(), "sent": sent}
        pictures.append(picture)
    return pictures


def count_axes() -> dict[str, list]:
    """Count what each rank of three_axes.py sends in a step, on a mesh of 2 x 2 x 2 ranks.

    The global batch has 128 images.

    Returns:
        For each axis the bytes that each rank sends along it.
    """
    names = ("dp", "cp", "tp")
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    model = Transformer()
    attend = context_parallel.RingAttention.apply
    places = context_parallel.zigzag(TOKENS, 2)
    context_parallel.split_tokens(model, attend, places, mesh.get_group("cp"))
    three_axes.split_by_hand(model, sequence=False, group=mesh.get_group("tp"))
    with Messages() as messages:
        _forward_and_backward(model, *_batch(64))
        three_axes.add_up_gradients(model, [mesh.get_group("dp"), mesh.get_group("cp")])
    sent = {}
    for name in names:
        own = round(messages.sent(group=mesh.get_group(name).group_name))
        sent[name] = of_all_ranks(own)
    return sent


# Who waits for whom


def time_calls() -> dict[str, list[list]]:
    """Note when two ranks are in which call, in exchanges of both point-to-point lessons.

    Returns:
        For each exchange a list of [rank, kind of the call, start, end], in seconds.
    """
    rank = dist.get_rank()
    other = 1 - rank
    exchanges = {}
    with mock.patch.object(blocking_p2p, "report"):  # which would send messages, too
        blocking_p2p.relay(rank, CPU, late=None)  # connects the ranks
        for late in (0, 1):
            with Calls() as calls:
                blocking_p2p.relay(rank, CPU, late)
            exchanges[f"rank {late} is late"] = calls.of_all_ranks()
    for exchange in (nonblocking_p2p.blocking, nonblocking_p2p.nonblocking):
        mine = torch.zeros(2)
        theirs = torch.zeros(2)
        with Calls(computing=nonblocking_p2p.compute) as calls:
            if rank == 0:
                time.sleep(0.5)
            exchange(mine, theirs, other, other)
        exchanges[exchange.__name__] = calls.of_all_ranks()
    rows = {}
    for name, spans in exchanges.items():
        rows[name] = []
        for span in sorted(spans):
            rows[name].append([span.rank, span.kind, round(span.start, 6), round(span.end, 6)])
    return rows


# Overlap


def time_overlap(flags: tuple[str, ...]) -> dict[str, dict[str, list]]:
    """Trace steps of profile_steps.py with DDP: with buckets of 1 MiB, and with a single bucket.

    Args:
        flags: more flags of the lesson.

    Returns:
        For both, the step of rank 0 that takes the median time: "forward", "backward", "optimizer"
        ([start, end]) and "messages" (one [start, end] each), in ms from its start.
    """
    steps = {}
    for name, mebibytes in (("buckets of 1 MiB", 1), ("one bucket", 1000)):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", "2", str(PLAYGROUND / "profile_steps.py")]
            command += ["--device", "cpu", "--out", folder, "--bucket_cap_mb", str(mebibytes)]
            subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
            trace = json.loads(Path(folder, "rank0.json").read_text())
        found = [_parts_of_step(trace, *step) for step in whole_steps(trace)]
        found.sort(key=lambda parts: parts["optimizer"][1])
        steps[name] = found[len(found) // 2]
    return steps


def _parts_of_step(trace: dict, start: float, end: float) -> dict[str, list]:
    """Return when a step of a trace computes and sends, in ms from its start."""

    def inside(pattern):
        spans = []
        for first, last in sorted(named(trace, pattern)):
            if start <= first < end:
                spans.append([round((first - start) / 1000, 2), round((last - start) / 1000, 2)])
        return spans

    forward = inside(r"\w+ DistributedDataParallel\.forward")
    backward = inside("cpu_op autograd::engine::evaluate_function")
    optimizer = inside(r"user_annotation Optimizer\.step")
    return {
        "forward": [forward[0][0], backward[0][0]],  # and the loss
        "backward": [backward[0][0], max(last for _, last in backward)],
        "optimizer": optimizer[0],
        "messages": inside("user_annotation gloo:"),
    }


# All of them

IN_RANKS = {  # the number of ranks, and what is counted with it
    2: {
        "waits": time_calls,
        "data_parallel": count_data_parallel,
        "tensor": count_tensor,
        "experts": count_experts,
    },
    4: {
        "holds": count_memory,
        "ring": count_ring,
        "fsdp": count_fsdp,
        "schedules": count_schedules,
        "mesh": count_mesh,
        "split": count_split,
        "context": count_context,
    },
    8: {"axes": count_axes},
}
WIDE = ("--dataset", "digits", "--batch_size", "240", "--width", "1024", "--layers", "5")


def count(names: list[str]) -> dict[str, Any]:
    """Return what the pictures with these names show."""
    counts = {}
    for world_size, functions in IN_RANKS.items():
        wanted = {name: function for name, function in functions.items() if name in names}
        if wanted:
            counts |= in_ranks(wanted, world_size)
    if "overlap" in names:
        counts["overlap"] = time_overlap(WIDE)
    return counts
