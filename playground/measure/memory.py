"""What each rank holds in memory and sends in a step: counted, and by ZeRO's formulas."""

from collections import Counter
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def held(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes that tensors keep in memory: the storages behind them, each once, whole, whoever shares it."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def show_memory(stage: int, shards: list, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Print what each rank holds and has sent in a step, beside the formulas. All ranks call it, rank 0 prints.

    Call it after a step, while the gradients are there.

    Args:
        stage: of ZeRO, 1 to 3.
        shards: a `Shard` of manual_sharding.py for each weight.
        optimizer: Adam.
        steps: in which the shards' messages were sent, of which they count each name and size.
    """
    tensors = [tensor for shard in shards for tensor in (shard.weight, shard.whole, shard.mine)]
    state = [value for averages in optimizer.state.values() for value in averages.values()]
    kinds, sent = Counter(), 0
    for (name, size), number in sum((shard.sent for shard in shards), Counter()).items():
        kinds[name] += number
        sent += number * size
    mine = [held(tensors), held(tensor.grad for tensor in tensors), held(state), sent / steps]
    world_size = dist.get_world_size()
    everyone = [None] * world_size
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() > 0:
        return
    count = sum(shard.view.numel() for shard in shards)
    size = count * shards[0].view.element_size()  # of all weights
    message = size * (world_size - 1) / world_size  # what a reduce_scatter or an all_gather of them sends
    ddp = [size, size, 2 * size, 2 * message]
    formula = [size, size, 2 * size / world_size, 2 * message]
    if stage >= 2:
        formula[1] /= world_size
    if stage == 3:
        formula[0], formula[3] = size / world_size, 3 * message
    print("bytes     weights       gradients     Adam's state  together      for a weight  sent in a step")
    rows = {f"rank {rank}": row for rank, row in enumerate(everyone)} | {"formula": formula, "DDP": ddp}
    for name, row in rows.items():
        numbers = "".join(f"{number:<14,.0f}" for number in (*row[:3], sum(row[:3])))
        print(f"{name:<10}{numbers}{sum(row[:3]) / count:<14.2f}{row[3]:,.0f}")
    each = " and ".join(f"{number // steps} {name}" for name, number in sorted(kinds.items()))
    print(f"messages in a step: {each}; DDP: 1 all_reduce for each bucket of gradients", flush=True)
