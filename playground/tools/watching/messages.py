"""The messages of a rank, noted where PyTorch hands them to the backend.

PyTorch calls an operation such as c10d::allreduce_ for each message. A TorchDispatchMode sees every
operation before it runs, also those of batch_isend_irecv, hooks, DDP and DTensors. So no function
of torch.distributed is replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {  # PyTorch's operations, and what the lessons call them
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
}
# In these operations of c10d, the first argument is what a rank sends. In the others it is the
# second, after what the rank receives.
SENDS_FIRST = {"send", "recv", "all_reduce", "broadcast", "reduce"}


@dataclass
class Message:
    """One message of this rank to or from another rank, or one collective.

    Attributes:
        kind: "send", "recv", "all_reduce", ...: the values of KINDS.
        group: the name of the process group.
        nbytes: bytes of the tensors that this rank passes (or receives, for a recv).
        sent: bytes that this rank sends if the ranks form a ring. See sent_bytes.
    """

    kind: str
    group: str
    nbytes: int
    sent: float


class Messages(TorchDispatchMode):
    """Inside `with Messages() as messages:`, the messages of this rank are noted.

    Attributes:
        noted: a list of Messages, in the order in which they were started.
    """

    def __init__(self):
        super().__init__()
        self.noted = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch asks this when the class is made. True would import its compiler in each rank."""
        return False

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """PyTorch calls this in place of each operation."""
        # An operation on DTensors becomes operations on plain tensors if this returns
        # NotImplemented. The name is compared, because importing the class takes time.
        if any(each.__name__ == "DTensor" for each in types):
            return NotImplemented
        kind = kind_of(operation)
        if kind:
            self.note(kind, operation, args)
        return operation(*args, **(kwargs or {}))

    def note(self, kind: str, operation: Any, args: tuple) -> None:
        """Note a message before it starts."""
        group = process_group(args)
        nbytes = sum(tensor.nbytes for tensor in passed(kind, operation, args))
        kept = kept_bytes(kind, operation, args, nbytes, group)
        sent = sent_bytes(kind, nbytes, group.size(), kept)
        self.noted.append(Message(kind, group.group_name, nbytes, sent))

    def of(self, kind: str | None = None, group: str | None = None) -> list[Message]:
        """Return the messages of one kind and in one process group; None: of all."""
        found = []
        for message in self.noted:
            if kind in (None, message.kind) and group in (None, message.group):
                found.append(message)
        return found

    def sent(self, kind: str | None = None, group: str | None = None) -> float:
        """Return the bytes that this rank has sent in these messages."""
        return sum(message.sent for message in self.of(kind, group))


def kind_of(operation: Any) -> str | None:
    """Return what the lessons call an operation, or None if it is no message."""
    if operation.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
        return None
    return KINDS.get(operation._schema.name.partition("::")[2])


def passed(kind: str, operation: Any, args: tuple) -> list[Tensor]:
    """Return the tensors that this rank passes to an operation (or receives, for a recv)."""
    first = kind in SENDS_FIRST or operation.namespace != "c10d" or len(args) < 2
    return flat(args[0] if first else args[1])


def process_group(args: tuple) -> dist.ProcessGroup:
    """Return the process group among the arguments of an operation."""
    for value in args:
        if isinstance(value, dist.ProcessGroup):
            return value
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
    return _resolve_process_group(args[-1])  # operations that DTensors call get its name


def kept_bytes(
    kind: str, operation: Any, args: tuple, nbytes: int, group: dist.ProcessGroup
) -> float:
    """Return how many of the bytes that a rank passes to an all_to_all are for itself; otherwise 0.

    The parts for the ranks may be uneven: a list of tensors, or one tensor and a list of counts.
    """
    if kind != "all_to_all":
        return 0
    if isinstance(args[1], (list, tuple)) and isinstance(args[0], (list, tuple)):
        return args[1][group.rank()].nbytes
    # How many rows go to each rank. An empty list: equally many.
    if operation.namespace == "c10d":
        counts = args[4] if len(args) > 4 else []
    else:
        counts = args[2]
    if sum(counts) == 0:
        return nbytes / group.size()
    return nbytes * counts[group.rank()] / sum(counts)


def sent_bytes(kind: str, nbytes: int, size: int, kept: float = 0) -> float:
    """Return how many bytes a rank sends when it passes `nbytes` to a collective of `size` ranks.

    The formulas are those of a ring, as in playground/collectives.py. For broadcast and reduce, all
    ranks but one send the whole tensor, and here it is counted for all of them. `kept` is what an
    all_to_all has for this rank itself.
    """
    others = size - 1
    if kind in ("recv", "barrier"):
        return 0
    if kind == "all_reduce":
        return 2 * others * nbytes / size
    if kind == "all_gather":
        return others * nbytes
    if kind == "all_to_all":
        return nbytes - kept
    if kind in ("reduce_scatter", "scatter"):
        return others * nbytes / size
    return nbytes


def flat(value: Tensor | Sequence) -> list[Tensor]:
    """Return the tensors in a tensor, a list of tensors or a list of such lists."""
    if isinstance(value, Tensor):
        return [value]
    tensors = []
    if isinstance(value, (list, tuple)):
        for part in value:
            tensors += flat(part)
    return tensors
