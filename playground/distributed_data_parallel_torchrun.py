"""The easy way: torchrun starts the ranks, and the environment says who is who.

torchrun comes with PyTorch. On each node it starts the processes and gives them RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT as environment variables, where init_process_group finds them. So this lesson spawns
nothing and has no flags for nodes, processes and addresses.

    torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_torchrun.py    # one node, a free port
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint <ip of node 0>:29500 \\
        playground/distributed_data_parallel_torchrun.py    # the same on both nodes; run/torchrun_node.sh adds checks
    python playground/distributed_data_parallel_torchrun.py    # one process: check() sets its variables

It prints who is who, and single_gpu.py's numbers (times will differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.54 s  38,906 images/s

Break it, in a copy: after join write `assert rank == 0`. What does torchrun report, and what without @record?
"""

import argparse
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS


def join(args):
    """Join the process group and print who is who. Returns this process's rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # NEW: this process on its node, from 0
    gpu = torch.device("cuda", local_rank) if args.device == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)  # else every rank would also use GPU 0
    # NEW: reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT from the environment
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank, device, node = dist.get_rank(), gpu or torch.device("cpu"), os.environ.get("GROUP_RANK", "0")
    me = f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{os.uname().nodename}"
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
            loss.backward()
            optimizer.step()
        loss_sum += loss.detach().double() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    totals = torch.tensor([loss_sum, hits, seen], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()


@record  # NEW: if a rank fails, torchrun's report has its traceback
def train(args):
    """Train, test and report, one line an epoch."""
    rank, device = join(args)
    meet(args)  # guard rail
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
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model.module, test_loader, device)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        if rank == 0 and args.savefile:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole
    dist.destroy_process_group()


def main():
    """Read the flags and be one of the ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
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
    check(parser, args)  # guard rail
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(f"--batch_size {args.batch_size} can't be shared by {world_size} processes: use {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # one rank of a node at a time
    train(args)  # NEW: in every process that torchrun has started


if __name__ == "__main__":
    with explained():  # guard rail
        main()
