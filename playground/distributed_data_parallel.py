"""DistributedDataParallel: one process per GPU, on one machine or on many.

manual_data_parallel.py averages the gradients itself, after backward(). DistributedDataParallel (DDP) does it inside
backward(): a bucket of gradients is all-reduced as soon as it is complete, while the layers before it still compute.
DDP also sends rank 0's weights to all ranks at the start. What is left to us: a sampler that gives each rank its share
of every batch, and sums over the ranks before a number is printed.

    python playground/distributed_data_parallel.py -g 2    # two processes: two GPUs, or two shares of a CPU
    python playground/distributed_data_parallel.py -n 2 -g 2 -nr 0 -ip <ip of node 0>    # node 0 of two
    python playground/distributed_data_parallel.py -n 2 -g 2 -nr 1 -ip <ip of node 0>    # node 1 of two

Any number of processes that can share a batch gives single_gpu.py's numbers, up to rounding (pids, times will differ):

    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.54 s  38,906 images/s

Break it, in a copy:
  1. Comment out `sampler.set_epoch(epoch)`: which order has each epoch then? Compare the losses of the second.
  2. Let only rank 0 test: write `if rank == 0:` before `_, test_hits, test_seen = ...`. Where does each rank wait?
  3. Add `self.unused = nn.Linear(1, 1)` to the MLP in common/models.py. What does DDP miss, and what does it advise?
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS


def join(local_rank, args):
    """Join the process group and print who is who. Returns this process's rank and its device."""
    rank = args.nr * args.gpus + local_rank
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else every rank would also use GPU 0
    else:
        torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))  # the ranks share the cores
    dist.init_process_group(
        args.backend or ("nccl" if device.type == "cuda" else "gloo"),  # what carries the messages
        init_method=args.init_method or f"tcp://{args.ip}:{args.port}",  # where all meet: rank 0 listens there
        rank=rank,
        world_size=args.nodes * args.gpus,
        timeout=timedelta(seconds=args.timeout),  # to meet, and of each message
        device_id=device if device.type == "cuda" else None,
    )
    me = f"{args.nr:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{os.uname().nodename}"
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, me)
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", *everyone, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or test without an optimizer. Returns sums over the images of all ranks: loss, hits, images."""
    model.train(optimizer is not None)
    loss_sum = hits = seen = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()  # NEW: with DDP, all ranks have the same mean gradients after it
            optimizer.step()
        loss_sum += loss.detach().double() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    totals = torch.tensor([loss_sum, hits, seen], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()


def train(local_rank, args):
    """Train, test and report, one line an epoch."""
    rank, device = join(local_rank, args)
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    share = args.batch_size // world_size
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    mine = range(rank, len(test_set), world_size)  # no padding: each test image counts exactly once
    test_loader = DataLoader(test_set, 1000, sampler=mine, **options)
    model = MODELS[args.model](args.width, args.layers).to(device)
    model = DistributedDataParallel(model)  # NEW: sends rank 0's weights to all ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        plain = model.module  # NEW: DDP's forward() may wait for other ranks, and they may have fewer test batches
        _, test_hits, test_seen = run_epoch(plain, test_loader, device)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        if rank == 0 and args.savefile:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}  # NEW: plain keys
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole
    dist.destroy_process_group()


def main():
    """Read the flags and start this node's ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("-n", "--nodes", type=int, default=1, help="machines")
    add("-g", "--gpus", type=int, help="processes on each; default: its GPUs, or 2")
    add("-nr", "--nr", type=int, default=0, help="number of this machine, from 0")
    add("-ip", "--ip", default="127.0.0.1", help="address of machine 0")
    add("--port", type=int, default=8888, help="of machine 0; a single machine chooses a free one")
    add("--init_method", metavar="URL", help="tcp://..., env:// or file:///a/new/file in place of -ip and --port")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--backend", choices=["gloo", "nccl", "mpi"], help="default: nccl on GPUs, gloo on CPUs")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--model", choices=MODELS, default="mlp")
    add("--width", type=int, help="neurons in each hidden layer; default: 64 (mlp), 120 (cnn)")
    add("--layers", type=int, help="hidden layers, the linear ones in cnn; default: 3 (mlp), 1 (cnn)")
    add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits where it can't be had")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="float64: no rounding to be seen between the lessons")
    add("-s", "--savefile", help="write a checkpoint here after each epoch")
    args = parser.parse_args()
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check(parser, args)  # guard rail
    world_size = args.nodes * args.gpus
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(f"--batch_size {args.batch_size} can't be shared by {world_size} processes: use {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # once per node, before its ranks start
    meet(args)  # guard rail
    mp.spawn(train, (args,), args.gpus)  # train(0, args), train(1, args), ... each in a process of its own


if __name__ == "__main__":
    with explained():  # guard rail
        main()
