r"""torchrun: it starts the ranks, and the environment tells each process its rank.

torchrun comes with PyTorch. It starts the processes of a node, and it sets variables in the
environment of each process. init_process_group() reads four of them by itself: RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. The lesson reads two more: LOCAL_RANK selects the GPU, and GROUP_RANK
is the number of the node. So this lesson starts no processes, and it has no flags for nodes,
processes or addresses.

Run it on one node (--standalone makes torchrun choose a free port):
    torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_torchrun.py

Run it on two nodes, with the same command on both (run/torchrun_node.sh adds checks to it). Here
"rdzv" is short for rendezvous, and "c10d" is the name of torchrun's built-in rendezvous:
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \
        --rdzv-endpoint <ip of node 0>:29500 playground/distributed_data_parallel_torchrun.py

Run it in a single process, without torchrun (common/guard_rails.py then sets the variables):
    python playground/distributed_data_parallel_torchrun.py

It prints the table of ranks and the same numbers as single_gpu.py (times will differ):
    epoch 1/3  loss 0.3961  train 88.27%  test 94.00%  1.12 s  53,396 images/s

torchrun may warn first that it sets OMP_NUM_THREADS to 1. On a CPU each process then computes with
one core.

Try breaking it, in a copy:
  1. Write `assert rank == 0` after `rank, device = join(args)`. What does torchrun report, and what
     does it report if you also remove `@record`?

Two programs in playground/exercises/ have a fault: fault_lost_connection.py and
fault_missing_file.py.

The next lesson, distributed_data_parallel_resumable.py, resumes after a process has died.
"""

import argparse
import os
import platform
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import MODELS
from common.roll_call import meet


def join(args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # NEW: torchrun has numbered the processes
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
    # NEW: the address, the rank and the world size come from the environment.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    node = os.environ.get("GROUP_RANK", "0")  # NEW: torchrun's number of this node
    row = f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over the images of all ranks: the losses, the images that were recognized,
    the images.
    """
    training = optimizer is not None
    model.train(training)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    return totals.tolist()


@record  # NEW: torchrun's report then contains the traceback of the rank that failed first
def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size
    pin_memory = device.type == "cuda"  # a GPU copies from pinned memory while Python continues
    train_loader = DataLoader(
        train_set,
        per_rank_batch,
        sampler=sampler,
        drop_last=True,
        collate_fn=whole_batch,  # common/data.py's data sets return whole batches already
        pin_memory=pin_memory,
    )
    # Each test image counts once. DistributedSampler would repeat some to make the parts equal.
    test_indices = range(rank, len(test_set), world_size)
    test_loader = DataLoader(
        test_set, 1000, sampler=test_indices, collate_fn=whole_batch, pin_memory=pin_memory
    )
    model = MODELS[args.model](args.width, args.layers).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        # The order differs from epoch to epoch, and it is the same on all ranks and in each run.
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        hidden = None if rank == 0 else True  # None: the bar is hidden if there is no terminal
        progress = tqdm(train_loader, leave=False, disable=hidden)
        loss_sum, hits, seen = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model.module, test_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum / seen:.4f}"
                f"  train {hits / seen:.2%}  test {test_hits / test_seen:.2%}"
                f"  {seconds:.2f} s  {seen / seconds:,.0f} images/s",
                flush=True,
            )
        if rank == 0 and args.savefile:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch + 1, "args": vars(args)}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state, file)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(f"{args.savefile}.tmp", args.savefile)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


@explained  # guard rail: explains errors
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--model", choices=MODELS, default="mlp")
    add("--width", type=int, help="neurons in each hidden layer; default: 64 (mlp), 120 (cnn)")
    add("--layers", type=int, help="hidden linear layers; default: 3 (mlp), 1 (cnn)")
    add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits without mnist")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="compute in float64, so that lessons agree exactly")
    add("-s", "--savefile", help="write a checkpoint to this file after each epoch")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(
            f"--batch_size {args.batch_size} cannot be divided by {world_size} processes:"
            f" use --batch_size {nearest}"
        )
    # The ranks of a node fetch the data one at a time, so it is downloaded once.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
