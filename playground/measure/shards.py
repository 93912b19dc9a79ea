"""What each rank of fully_sharded_data_parallel.py holds and sends in a step: counted."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer

from measure.memory import Gathered, by_formula, print_messages, print_table

COMPUTING = ("aten.addmm", "aten.mm", "aten.convolution", "aten.convolution_backward")


class GatheredByLayer(Gathered):
    """While this is active, it counts messages, and what is gathered while a layer computes.

    Attributes:
        by_layer: bytes of whole parameters, and of the buffers in which they arrive, for each
            direction ("forward" or "backward") and layer.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.by_layer = {"forward": {}, "backward": {}}
        self._place = None
        self._hooks = []
        layers = [each for each in model.modules() if list(each.parameters(recurse=False))]
        for number, layer in enumerate(layers, start=1):
            self._hooks.append(layer.register_forward_pre_hook(self._start_forward(number)))
            self._hooks.append(layer.register_forward_hook(self._watch_output(number)))

    def _start_forward(self, number: int) -> Any:
        """Return a hook that notes that the forward pass of a layer starts."""

        def hook(*_):
            self._place = ("forward", number)

        return hook

    def _watch_output(self, number: int) -> Any:
        """Return a hook that lets the output note when backward() comes to its layer."""

        def start_backward(_):
            self._place = ("backward", number)

        def hook(layer, inputs, output):
            output.register_hook(start_backward)

        return hook

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """PyTorch calls this in place of each operation."""
        if self._place and str(operation.overloadpacket) in COMPUTING:
            # A parameter is a DTensor, of which this rank has a shard, unless it is gathered.
            whole = [each for each in self.model.parameters() if not isinstance(each, DTensor)]
            now = sum(each.nbytes for each in whole) + self.gathered()
            direction, number = self._place
            before = self.by_layer[direction].get(number, 0)
            self.by_layer[direction][number] = max(before, now)
        return super().__torch_dispatch__(operation, types, args, kwargs)

    def remove_hooks(self) -> None:
        """Remove the hooks from the layers."""
        for hook in self._hooks:
            hook.remove()


def show_sharding(
    model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor, keep_weights: bool
) -> None:
    """Run forward and backward once more, and print what each rank holds and sends.

    All ranks call it, and rank 0 prints.

    Args:
        model: sharded by fully_shard.
        optimizer: Adam, which has made a step.
        images, labels: a batch of this rank, (B, 1, 28, 28) and int64 (B,).
        keep_weights: whether parameters are gathered once in a step, and not twice.
    """
    device = next(model.parameters()).device
    images = images.to(device)
    labels = labels.to(device)
    optimizer.zero_grad()
    F.cross_entropy(model(images), labels).backward()  # the first one after a test gathers more
    optimizer.zero_grad()
    counted = GatheredByLayer(model)
    with counted:
        F.cross_entropy(model(images), labels).backward()
    counted.remove_hooks()
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    state = []
    for averages in optimizer.state.values():
        state += averages.values()
    own = [_bytes(parameters), _bytes(gradients), _bytes(state), counted.sent()]
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, own)
    if dist.get_rank() > 0:
        return
    size = sum(parameter.nbytes for parameter in parameters)  # of all shards together
    count = sum(parameter.numel() for parameter in parameters)
    print_table(rows, by_formula(3, size, len(rows), keep_weights), size, count)
    for direction, most in counted.by_layer.items():
        print(_row(direction, [f"layer {number}" for number in most]))
        print(_row("gathered", [f"{size:,}" for size in most.values()]))
    print_messages(counted)


def _row(name: str, cells: list[str]) -> str:
    """Return a row of the table, with its name in front."""
    return f"{name:<10}" + "".join(f"{cell:<14}" for cell in cells).rstrip()


def _bytes(tensors: list[Tensor]) -> int:
    """Return what tensors take on this rank. Of a DTensor it has its own shard."""
    shards = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(shard.nbytes for shard in shards)
