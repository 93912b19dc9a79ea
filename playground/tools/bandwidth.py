"""Is this machine as fast as it should be? Measures what its ranks compute, and what they send.

    torchrun --standalone --nproc-per-node 4 playground/tools/bandwidth.py  # 4: the number of GPUs
    NODE0=10.0.0.1 GPUS=8 run/torchrun_node.sh playground/tools/bandwidth.py  # on each node

It prints
  1. for each rank, the speed of a product of two matrices, and of a copy within its memory, while
     all ranks do the same. Equal GPUs differ by a few per cent.
  2. for each call and size, the time, the size divided by the time, and the bandwidth on the bus,
     all as nccl-tests define them. On the bus is what each rank would send in a ring, so compare it
     with the speed of the slowest link.
  3. for each pair of ranks, one pair at a time, GB/s from the rank of the row to that of the
     column, and the microseconds that 4 bytes take. A slow link is a row, a column or a block.

1 GB/s is 8 Gbit/s. What is normal: playground/pages/hardware.md. A call that takes a second is not
tried with larger messages. With fewer GPUs than ranks, the ranks send from the CPU, with gloo.
"""

import os
import platform
import time
import warnings
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)  # names that work everywhere
SIZES = [4096 * 16**power for power in range(5)]  # 4 KiB to 256 MiB


def measure(call):
    """Return the median time of a call on each rank. All ranks make equally many calls."""
    once(call, 1)  # makes connections and buffers
    count = 1
    while max(once(call, count)) < 0.02 and count < 256:
        count *= 4
    rounds = [once(call, count) for _ in range(5)]
    return [median(times) / count for times in zip(*rounds, strict=True)]


def once(call, count):
    """Return the seconds that some calls, one after the other, take on each rank."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    if dist.get_backend() != "gloo":
        torch.accelerator.synchronize()  # a GPU only puts the calls into its queue
    return from_all(time.perf_counter() - start)


def from_all(value):
    """Return a list with the value of each rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def send(tensor, source, destination):
    """Send a tensor from one rank to another, while the rest do nothing."""
    if dist.get_rank() == source:
        dist.send(tensor, destination)
    elif dist.get_rank() == destination:
        dist.recv(tensor, source)


def there_and_back(tensor, one, other):
    """Send a tensor to a rank, which sends it back."""
    send(tensor, one, other)
    send(tensor, other, one)


def calls_of(size, device):
    """Return, by name, how often each rank would send a size in a ring, and the call."""
    rank, n = dist.get_rank(), dist.get_world_size()
    whole = torch.zeros(size // 4 // n * n, device=device)
    chunk, buffer = whole.chunk(n)[rank].clone(), whole.clone()
    part = (n - 1) / n
    return {
        "all_reduce": (2 * part, partial(dist.all_reduce, whole)),
        "all_gather": (part, partial(dist.all_gather_into_tensor, whole, chunk)),
        "reduce_scatter": (part, partial(dist.reduce_scatter_tensor, chunk, whole)),
        "all_to_all": (part, partial(dist.all_to_all_single, buffer, whole)),
        "broadcast": (1, partial(dist.broadcast, whole, 0)),
    }


def show_ranks(device):
    """Print how fast each rank computes and copies, while all others do the same."""
    on_gpu = device.type != "cpu"
    rows = 8192 if on_gpu else 512
    matrix = torch.rand(rows, rows, device=device).to(torch.bfloat16 if on_gpu else torch.float32)
    memory = torch.zeros(2**28 if on_gpu else 2**24, device=device)  # more than a cache holds
    products = measure(partial(torch.mm, matrix, matrix))
    copies = measure(partial(torch.clone(memory).copy_, memory))
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    names = from_all(f"{platform.node()}, {gpu}")
    for rank, (name, product, copied) in enumerate(zip(names, products, copies, strict=True)):
        speed = f"product {2e-12 * rows**3 / product:.3g} TFLOP/s"
        say(f"rank {rank}, {name}: {speed}, copy {8e-9 * len(memory) / copied:.3g} GB/s")


def show_calls(device):
    """Print the bandwidths of each call and size."""
    say(f"\n{'call':16}{'KiB':>8}{'ms':>11}{'GB/s':>10}{'on the bus':>12}")
    for name in calls_of(SIZES[0], device):
        for size in SIZES:
            factor, call = calls_of(size, device)[name]
            seconds = max(measure(call))
            speed = 1e-9 * size / seconds
            numbers = f"{size // 1024:8,}{1000 * seconds:11.3f}{speed:10.4g}{factor * speed:12.4g}"
            say(f"{name:16}{numbers}")
            if seconds > 1:
                break


def show_pairs(title, call, tensor, amount):
    """Print an amount for each second, or seconds, of two ranks that have the links alone."""
    n = dist.get_world_size()
    say(f"\n{title:9}" + "".join(f"{to:9}" for to in range(n)))
    for one in range(n):
        row = f"from {one:<4}"
        for other in range(n):
            cell = "-" if one == other else amount(max(measure(partial(call, tensor, one, other))))
            row += f"{cell:>9}" if one == other else f"{cell:9.4g}"
        say(row)


def say(line):
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(line, flush=True)


def main():
    """Measure, as one of the ranks that torchrun starts."""
    on_gpu = torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cpu")
    if on_gpu:
        kind = torch.accelerator.current_accelerator()
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, device_id=device if on_gpu else None)
    say(f"{dist.get_world_size()} ranks, {backend}, torch {torch.__version__}")
    show_ranks(device)
    number = torch.zeros(1, device=device)
    tensor = torch.zeros(2**24 if on_gpu else 2**20, device=device)  # 64 MiB or 4
    if dist.get_world_size() > 1:
        show_calls(device)
        show_pairs("GB/s to", send, tensor, lambda seconds: 4e-9 * len(tensor) / seconds)
        show_pairs("us to", there_and_back, number, lambda seconds: 0.5e6 * seconds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
