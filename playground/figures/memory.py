"""What each rank holds if a model is sharded, counted."""

import time
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from figures.messages import Messages


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
