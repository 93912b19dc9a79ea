r"""torchrun starts the ranks, and passes each its rank in environment variables.

Run it on one node (`--standalone` makes torchrun choose a free port):
    torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_torchrun.py

It prints the same numbers as `single_gpu.py`, up to rounding (times differ; on a GPU, the peak of
its memory follows):
    2 ranks, gloo, cpu
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.43 s  41,881 images/s

torchrun comes with PyTorch. It starts the processes of a node, and sets variables in the
environment of each. `init_process_group` reads four of them: `RANK`, `WORLD_SIZE`, and the address
and port at which all ranks find rank 0, `MASTER_ADDR` and `MASTER_PORT`. `join` reads a fifth,
`LOCAL_RANK`, which selects the GPU. So the lesson starts no processes itself, and it needs no flags
for nodes, processes or addresses.

On two nodes, run the same command on both. The nodes find each other at the address of one of them,
port 29500. torchrun numbers them, so rank 0, which prints, may be on either:
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \
        --rdzv-endpoint <ip of one node>:29500 playground/distributed_data_parallel_torchrun.py

Use torchrun, also from a notebook, unless a larger program must start the ranks itself. Then do it
as `distributed_data_parallel.py` does. torchrun may warn that it sets `OMP_NUM_THREADS` to 1: each
process then uses one core of a CPU. To use more, put OMP_NUM_THREADS=4 in front of the command.

If a rank fails, a wrong flag is named before torchrun's report, and any other error at its end, as
`Root Cause`.

This is the lesson to copy into a project of your own: the end of README.md says what to replace.
Nearly all later lessons repeat its functions below a line that names it.

Try breaking it, in a copy beside it:
  1. Write `assert rank == 0` after `rank, device = join(args)`. What does torchrun report, and what
     does it report if you also remove `@record`?

Now repair two programs in `playground/exercises/`: `fault_lost_connection.py` and
`fault_missing_file.py`.

Builds on: distributed_data_parallel.py
The next lesson, `model_parallel.py`, puts a model on two devices.
"""

import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find common/ from any folder
from common import flags
from common.data import fetch, load, whole_batch
from common.models import make_model


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # NEW: torchrun has numbered this node's processes
    device = torch.device(args.device)
    gpu = None
    if args.device != "cpu":
        gpu = device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    # NEW: the address, the rank and the world size are in the environment.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


@record  # NEW: writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.ranks(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)  # NEW: an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    # fetch() lets one process of a node download. Without a group, the others do not time out.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


def train(args):
    """Train as one of the ranks that torchrun has started."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    fit(model, optimizer, train_loader, test_loader, device, args)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


# ---------- Nearly as in distributed_data_parallel.py ----------
# If you have read that lesson, you can stop here. If you copy this one, copy everything. Later
# lessons have their own add_flags() and check_flags().


def loaders(args, rank, world_size):
    """Return a DataLoader of this rank's training images, and one of its test images."""
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    # These data sets return whole batches. For your own, leave collate_fn out, and set num_workers.
    options = {"collate_fn": whole_batch, "pin_memory": args.device != "cpu"}
    # Each rank gets its own part of every global batch. All parts have the same size.
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size
    train_loader = DataLoader(train_set, per_rank_batch, sampler=sampler, drop_last=True, **options)
    if len(train_loader) == 0:
        raise ValueError("a batch is larger than the training set: use a smaller --batch_size")
    # Each test image counts once, and all ranks have equally many test batches, because in later
    # lessons (FSDP and others) each forward() is a collective.
    batches = torch.arange(len(test_set)).tensor_split(math.ceil(len(test_set) / 1000))
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    test_loader = DataLoader(test_set, batch_sampler=own_batches, **options)
    return train_loader, test_loader


def fit(model, optimizer, train_loader, test_loader, device, args):
    """Train and test, and print one line for each epoch."""
    rank = dist.get_rank()
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
        start = time.perf_counter()
        title = f"epoch {epoch + 1}/{args.epochs}"
        # Only rank 0 shows a bar, and only in a terminal.
        bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
        loss, correct, images = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        speed = len(train_loader) * args.batch_size / seconds
        # DDP sends messages in forward(), too. So if there is DDP, test the model inside it.
        plain = getattr(model, "module", model)
        _, test_correct, test_images = run_epoch(plain, test_loader, device)
        if rank == 0:
            digits = 12 if args.double else 4
            peak = ""  # of the memory that this rank's tensors have taken on its GPU
            if args.device != "cpu":
                peak = f"  {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB"
            print(
                f"{title}  loss {loss / images:.{digits}f}"
                f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
                f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s{peak}",
                flush=True,
            )


def run_epoch(model, loader, device, optimizer=None):
    """Train, or with no optimizer, test. Returns sums over all ranks: loss, correct, images."""
    model.train(optimizer is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


def add_flags(parser):
    """Add the flags that only this lesson has: none."""


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks."""
    parser.check_batch(args.batch_size, world_size)


if __name__ == "__main__":
    main()
