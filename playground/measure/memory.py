"""What each rank holds and sends if a model is sharded: counted, and by the formulas of ZeRO."""

import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from measure.messages import Messages
from measure.timeline import Calls

COLUMNS = ["parameters", "gradients", "Adam's state", "together", "/parameter", "sent in a step"]


def held(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes that tensors keep in memory.

    A tensor keeps the whole storage behind it, and a storage of several tensors counts once.
    """
    sizes = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class Kept(saved_tensors_hooks):
    """Inside `with Kept(model) as kept:`, what autograd keeps for backward() is noted.

    Args:
        model: its parameters are left out, because they are in memory anyway.
    """

    def __init__(self, model: nn.Module):
        super().__init__(self.note, lambda tensor: tensor)
        self._parameters = {_storage(each).data_ptr() for each in model.parameters()}
        self._storages = {}

    def __enter__(self) -> "Kept":
        """Start to note."""
        super().__enter__()
        return self

    def note(self, tensor: Tensor) -> Tensor:
        """Note a tensor that is kept, and return it."""
        storage = _storage(tensor)
        self._storages[storage.data_ptr()] = storage
        return tensor

    def nbytes(self) -> int:
        """Return the bytes of all that was kept. What shares memory counts once."""
        total = 0
        for address, storage in self._storages.items():
            if address not in self._parameters:
                total += storage.nbytes()
        return total


class Gathered(Messages):
    """Notes the messages of this rank, and what its all_gathers have in memory.

    Attributes:
        most: bytes of gathered tensors that were in memory at the same time, at most.
    """

    def __init__(self):
        super().__init__()
        self.most = 0
        self._outputs = []  # weak references, which do not keep memory from being freed

    def note(self, kind: str, operation: Any, args: tuple) -> None:
        """Note a message before it starts."""
        super().note(kind, operation, args)
        if kind == "all_gather":
            self._outputs.append(weakref.ref(args[0].untyped_storage()))
            self.most = max(self.most, self.gathered())

    def gathered(self) -> int:
        """Return the bytes of gathered tensors that are in memory now."""
        time.sleep(0.01)  # gloo's thread may hold a tensor for a moment after its message
        sizes = {}
        for reference in self._outputs:
            storage = reference()
            if storage is not None:
                sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())


def by_formula(stage: int, size: float, world_size: int, keep_weights: bool = False) -> list[float]:
    """Return what a rank holds of parameters, gradients and Adam's state, and what it sends.

    Args:
        stage: of ZeRO, 1 or 3; 0 is DDP.
        size: bytes of all parameters.
        world_size: number of ranks.
        keep_weights: whether stage 3 gathers the parameters once in a step, and not twice.
    """
    parameters = size / world_size if stage == 3 else size
    gradients = size / world_size if stage == 3 else size
    state = 2 * size / world_size if stage >= 1 else 2 * size
    messages = 3 if stage == 3 and not keep_weights else 2
    return [parameters, gradients, state, messages * size * (world_size - 1) / world_size]


def show_memory(
    stage: int,
    model: nn.Module,
    optimizer: Any,
    images: Tensor,
    labels: Tensor,
    keep_weights: bool = False,
) -> None:
    """Make one more step, and print what each rank holds and sends, beside the formulas.

    All ranks call it, and rank 0 prints. Gradients are counted when backward() has ended.

    Args:
        stage: of ZeRO, 1 or 3.
        model: the model, sharded.
        optimizer: ShardedOptimizer or, for stage 3, Adam.
        images, labels: a batch of this rank, (B, 1, 28, 28) and int64 (B,).
        keep_weights: whether stage 3 gathers the parameters once in a step, and not twice.
    """
    adam = getattr(optimizer, "optimizer", optimizer)
    parameters = list(model.parameters())
    images = images.to(parameters[0].device)
    labels = labels.to(parameters[0].device)
    tensors = list(parameters)
    for group in adam.param_groups:
        tensors += group["params"]
        group["lr"] = 0.0  # so the model stays as it was trained
    with Gathered() as messages:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        gradients = held(tensor.grad for tensor in tensors)
        optimizer.step()
    state = []
    for averages in adam.state.values():
        state += averages.values()
    own = [held(tensors), gradients, held(state), messages.sent()]
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    if dist.get_rank() == 0:
        count = sum(parameter.numel() for parameter in parameters)
        size = count * parameters[0].element_size()  # bytes of all parameters
        print_table(rows, by_formula(stage, size, len(rows), keep_weights), size, count)
        if stage == 3:
            most = messages.most
            print(f"whole parameters in memory at the same time: at most {most:,} bytes")
        print_messages(messages)


def show_waiting(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Run a step without an optimizer, and print when each rank waits for which message.

    All ranks call it, and rank 0 prints.

    Args:
        model: sends its messages with all_gather_into_tensor() and reduce_scatter_tensor().
        images, labels: a batch of this rank, (B, 1, 28, 28) and int64 (B,).
    """
    device = next(model.parameters()).device
    images = images.to(device)
    labels = labels.to(device)
    with Calls() as calls:
        F.cross_entropy(model(images), labels).backward()
    calls.show()


def print_table(rows: list[list[float]], formula: list[float], size: int, count: int) -> None:
    """Print what the ranks hold and send, and below it what the formulas say.

    Args:
        rows: for each rank the bytes of parameters, gradients and Adam's state, and the bytes sent.
        formula: what each row should be.
        size: bytes of all parameters.
        count: how many parameters (numbers) that is.
    """
    named_rows = {f"rank {rank}": row for rank, row in enumerate(rows)}
    named_rows["formula"] = formula
    named_rows["DDP"] = by_formula(0, size, len(rows))
    print("bytes     " + "".join(f"{column:<14}" for column in COLUMNS).rstrip())
    for name, row in named_rows.items():
        together = sum(row[:3])
        numbers = "".join(f"{number:<14,.0f}" for number in [*row[:3], together])
        print(f"{name:<10}{numbers}{together / count:<14.2f}{row[3]:,.0f}")


def print_messages(messages: Messages) -> None:
    """Print how many collectives of each kind there were."""
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    counted = [f"{len(messages.of(kind))} {kind}" for kind in kinds]
    print(f"messages of a step: {', '.join(counted)}. DDP: one for each bucket", flush=True)


def _storage(tensor: Tensor) -> UntypedStorage:
    """Return the memory of a tensor. Of a DTensor, this rank has a shard."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.untyped_storage()
