"""The messages of a rank, noted where PyTorch hands them to the backend.

PyTorch calls an operation such as c10d::allreduce_ for each message. A TorchDispatchMode sees every
operation before it runs, also those of batch_isend_irecv, hooks, DDP and DTensors. So no function
of torch.distributed is replaced.
"""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group, _world
from torch.utils._python_dispatch import TorchDispatchMode

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
KINDS = {  # a part of the names of PyTorch's operations, and what they are called in Python
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "send": "send",
    "recv": "recv",
    "barrier": "barrier",
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


class Operations(TorchDispatchMode):
    """Inside `with`, each operation of this rank calls before() and after()."""

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
        self.before(operation, args)
        result = operation(*args, **(kwargs or {}))
        self.after(operation, args, result)
        return result

    def before(self, operation: Any, args: tuple) -> None:
        """See an operation that is about to start."""

    def after(self, operation: Any, args: tuple, result: Any) -> None:
        """See an operation that has returned. A message may still travel."""


# torch.compile leaves alone what runs here. Otherwise it would compile the tool for each call.
frames = torch._C._dynamo.eval_frame
skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
frames.set_code_exec_strategy(Operations.__torch_dispatch__.__code__, skipped)


class Messages(Operations):
    """Inside `with Messages() as messages:`, the messages of this rank are noted.

    Attributes:
        noted: a list of Messages, in the order in which they were started.
    """

    def __init__(self):
        super().__init__()
        self.noted = []

    def before(self, operation: Any, args: tuple) -> None:
        """Note the operation if it is a message."""
        if operation.namespace in NAMESPACES:
            kind = kind_of(operation._schema.name.partition("::")[2])
            if kind:
                self.note(kind, operation, args)

    def note(self, kind: str, operation: Any, args: tuple) -> None:
        """Note a message before it starts."""
        group = process_group(args)
        nbytes = sum(tensor.nbytes for tensor in passed(kind, operation, args))
        kept = kept_bytes(kind, operation, args, nbytes, group)
        sent = sent_bytes(kind, nbytes, group.size(), kept)
        self.noted.append(Message(kind, group.group_name, nbytes, sent))

    def of(self, kind: str) -> list[Message]:
        """Return the messages of one kind."""
        return [message for message in self.noted if message.kind == kind]

    def sent(self, kind: str) -> float:
        """Return the bytes that this rank has sent in these messages."""
        return sum(message.sent for message in self.of(kind))


def kind_of(name: str) -> str | None:
    """Return which message an operation such as "allreduce_" is, or None."""
    plain = name.lower().replace("_", "")
    for part, kind in KINDS.items():
        if part in plain:
            return kind
    return None


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


def peer_of(kind: str, args: tuple, group: dist.ProcessGroup) -> int | None:
    """Return the other rank of a send or recv. None: a collective, or a recv from any rank."""
    if kind in ("send", "recv") and len(args) > 3:
        return dist.get_global_rank(group, args[2])
    return None


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
    counts = []  # how many rows go to each rank, if not equally many
    if operation.namespace == "c10d":
        counts = args[4] if len(args) > 4 else []
    elif operation.namespace != "_dtensor":
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


def group_of(name: str, description: str) -> str:
    """Return what tells a group from the default one: its description, or its ranks."""
    if description == "default_pg":
        return ""
    if description != "undefined":
        return description  # such as mesh_tp
    try:
        ranks = dist.get_process_group_ranks(_resolve_process_group(name))
    except RuntimeError:
        return "of a group that is gone"
    others = [group for group in _world.pg_names if group is not dist.group.WORLD]
    alike = [each for each in others if dist.get_process_group_ranks(each) == ranks]
    place = [_world.pg_names[each] for each in alike].index(name)
    return f"of ranks {ranks}" + (f" ({chr(ord('a') + place)})" if len(alike) > 1 else "")


def recorded_calls() -> list[dict[str, Any]]:
    """Return the last collectives of this rank, as PyTorch's recorder keeps them.

    No public function reads it. That of gloo does not keep send and recv.
    """
    if not dist.is_available() or not dist.is_initialized():
        return []
    read = torch._C._distributed_c10d
    if "nccl" in dist.get_backend():
        recorded = json.loads(read._dump_nccl_trace_json())
    else:
        recorded = json.loads(read._dump_fr_trace_json())
    return recorded.get("entries", [])


def last_calls() -> list[str]:
    """Return the last three collectives of this rank, and before them one that is not done.

    Each with its number, group, name, shapes and state.
    """
    with contextlib.suppress(KeyError, ValueError):  # another thread may end the group just now
        entries = recorded_calls()
        not_done = [entry for entry in entries[:-3] if not entry["retired"]]
        return [call_in_words(entry) for entry in [*not_done[:1], *entries[-3:]]]
    return []


def call_in_words(entry: dict[str, Any]) -> str:
    """Return what is recorded of a collective as text."""
    shapes = ", ".join("x".join(map(str, shape)) for shape in entry["input_sizes"])
    words = [
        f"#{entry['collective_seq_id']}",
        group_of(*entry["process_group"]),
        entry["profiling_name"].rpartition(":")[2],
        f"({shapes})" if entry["input_sizes"] else "",  # a barrier has no tensor
        "" if entry["retired"] else "not done",
    ]
    return " ".join(word for word in words if word)
