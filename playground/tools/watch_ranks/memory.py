"""The memory that a rank takes while the learner's function runs, and what of it stays taken."""

import gc
import time

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from watch_ranks.messages import Operations, flat

LOOKS = 100


class Memory(Operations):
    """Notes all memory that is taken inside `with Memory() as memory:`."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def after(self, operation, args, result):
        """Note the memory of what an operation has returned."""
        for tensor in flat(result):
            storage = tensor.untyped_storage()
            self.found[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()

    def kept(self, enough, *tensors):
        """Return how many bytes are still taken, without those of some tensors.

        gloo's own thread may hold the tensors of a message until its next turn. So this looks again
        and again, and lets it have its turn, while there are more than `enough` bytes. What is no
        tensor, because the learner has returned something else, takes nothing.
        """
        for _ in range(LOOKS):
            nbytes = self.taken(tensors)
            if nbytes <= enough:
                break
            time.sleep(0.02)
        return nbytes

    def taken(self, tensors):
        """Return how many bytes are taken now, without those of some tensors."""
        gc.collect()
        others = []
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                others.append(tensor.untyped_storage().data_ptr())
        total = 0
        for address, (storage, nbytes) in self.found.items():
            if address not in others and not storage.expired():
                total += nbytes
        return total
