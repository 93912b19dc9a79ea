"""What each rank of a sharded model holds, in bytes, and the messages of a step: counted, beside the formulas."""

import warnings

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional as F
from torch.optim import Optimizer


def show_sharding(model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor) -> None:
    """Run forward and backward, but not the optimizer. Rank 0 prints what all ranks hold then, and the messages.

    Args:
        model: sharded by fully_shard. All ranks must call this together.
        optimizer: of the model; it has made a step.
        images, labels: a batch, (N, 1, 28, 28) and int64 (N,).
    """
    device, gathered = next(model.parameters()).device, []
    images, labels = images.to(device), labels.to(device)

    def note(layer, _):
        if list(layer.parameters(recurse=False)):  # they are plain tensors now, and DTensors, shards, as long as not
            gathered.append(sum(weight.nbytes for weight in model.parameters() if not isinstance(weight, DTensor)))

    hooks = [layer.register_forward_pre_hook(note) for layer in model.modules()]
    for _ in range(2):  # the first step after a test gathers one layer too many
        gathered.clear()
        optimizer.zero_grad()
        with warnings.catch_warnings(action="ignore"), CommDebugMode() as messages:  # whose hooks make FSDP warn
            F.cross_entropy(model(images), labels).backward()
    for hook in hooks:
        hook.remove()
    weights = list(model.parameters())  # now that backward() has freed the gathered ones
    state = [value for values in optimizer.state.values() for value in values.values()]
    held = [_bytes(part) for part in (weights, [weight.grad for weight in weights], state)]
    dist.all_gather_object(rows := [None] * dist.get_world_size(), [*held, sum(held), *gathered])
    if dist.get_rank() > 0:
        return
    whole = [sum(weight.nbytes for weight in weights) * share for share in (1, 1, 2, 4)]  # of all shards together
    formula = [total // len(rows) for total in whole]  # in float32 (4 + 4 + 8) bytes a parameter / ranks
    print("bytes   weights    gradients  Adam       together   gathered while layer 1 computes, layer 2, ...")
    for name, row in [*((f"rank {rank}", row) for rank, row in enumerate(rows)), ("formula", formula), ("DDP", whole)]:
        print(f"{name:<8}" + "".join(f"{count:<11,}" for count in row).rstrip())
    counts = {str(name): count for name, count in messages.get_comm_counts().items()}
    words = [("allgather", "all_gather"), ("reduce_scatter", "reduce_scatter"), ("allreduce", "all_reduce")]
    told = (f"{sum(counts[name] for name in counts if part in name)} {word}" for part, word in words)
    print(f"messages of a step: {', '.join(told)}. DDP: an all_reduce for each 25 MB of gradients", flush=True)


def _bytes(tensors: list[Tensor]) -> int:
    """Return what tensors take on this rank: of a DTensor its own shard."""
    return sum(t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in tensors)
