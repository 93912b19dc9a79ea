"""Runs that last: checkpoints that are resumed, a log and curves, restarts by torchrun, nodes that come and go.

A long run often ends before it is done: a process dies, a node is lost, the job's time is up. So rank 0 keeps a folder
with a log, TensorBoard's curves and the last three checkpoints, and each start goes on from the newest. torchrun makes
the new start by itself: when a rank dies it ends the others and starts all again, --max-restarts times at most. Its
store, where ranks look each other up, would still have the dead ones' addresses: the variable gives each start its own.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
        playground/distributed_data_parallel_resumable.py
    python playground/distributed_data_parallel_resumable.py --epochs 5    # go on, in a single process
    tensorboard --logdir runs
    NODE0=<ip> NODES=1:2 RESTARTS=3 run/torchrun_node.sh playground/distributed_data_parallel_resumable.py    # on each

The last one starts with one node, and takes in a second whenever it comes. --run_dir must be a folder that all of them
see, and --batch_size one that any number of processes can share. A second start says (times will differ):

    runs/mlp-mnist: 3 of 5 epochs are done (--run_dir: start another run)
    epoch 4/5  loss 0.0968  train 96.97%  test 96.65%  1.49 s  40,152 images/s

Break it, in a copy:
  1. Kill a rank, by its pid in the table. Compare the last lines with those of a run without the kill.
  2. Leave the optimizer out of what is loaded. Why do the losses differ after a second start?
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
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS


def join(args):
    """Join the process group and print who is who. Returns this process's rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    gpu = torch.device("cuda", local_rank) if args.device == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)  # else every rank would also use GPU 0
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank, device, node = dist.get_rank(), gpu or torch.device("cpu"), os.environ.get("GROUP_RANK", "0")
    me = f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{os.uname().nodename}"
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, me)
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", *everyone, sep="\n", flush=True)
    return rank, device


def log(args, line):
    """Print a line and add it to the run folder's log."""
    print(line, flush=True)
    with open(f"{args.run_dir}/log.txt", "a") as file:
        print(line, file=file)


def newest_checkpoint(args):
    """Return the last checkpoint, or the one before it if that is damaged, and so on; None if there has been none."""
    paths = sorted(Path(args.run_dir).glob("epoch-*.pt"))
    while paths:
        path = paths.pop()
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # which one depends on where the damage is
            if not paths:
                sys.exit(f"error: {path} is damaged, and there is none before it: choose another --run_dir")
            log(args, f"WARNING: {path} is damaged ({type(error).__name__}): using the one before it")
            continue
        for name in ("model", "width", "layers", "dataset", "batch_size", "lr", "seed", "double"):
            if (then := state["args"][name]) != vars(args)[name]:  # the numbers depend on it
                sys.exit(f"error: {path} was trained with --{name} {then}: use that, or choose another --run_dir")
        log(args, f"{args.run_dir}: {state['epoch']} of {args.epochs} epochs are done (--run_dir: start another run)")
        return state


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


def save(args, epoch, model, optimizer):
    """Write a checkpoint, and remove all but the last three."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "args": vars(args)}
    with open(f"{args.run_dir}/unfinished.pt", "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())  # NEW: before it gets its name: the machine may die, too
    os.replace(f"{args.run_dir}/unfinished.pt", f"{args.run_dir}/epoch-{epoch:04}.pt")
    for old in sorted(Path(args.run_dir).glob("epoch-*.pt"))[:-3]:
        old.unlink()


@record
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
    found = [newest_checkpoint(args) if rank == 0 else None]
    dist.broadcast_object_list(found, device=device)  # NEW: one reads, all get the same
    if found[0]:  # NEW: all ranks go on from there
        model.module.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
    done = found[0]["epoch"] if found[0] else 0  # NEW: the sampler makes each epoch's order from its number
    curves = SummaryWriter(args.run_dir, purge_step=done + 1) if rank == 0 else None  # NEW: no epoch twice

    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model.module, test_loader, device)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            log(args, line)
            curves.add_scalar("loss", loss / seen, epoch + 1)
            curves.add_scalar("accuracy/train", hits / seen, epoch + 1)
            curves.add_scalar("accuracy/test", test_hits / test_seen, epoch + 1)
            curves.add_scalar("images per second", seen / seconds, epoch + 1)
            curves.flush()
            save(args, epoch + 1, model.module, optimizer)
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
    add("--run_dir", help="folder for log, curves and checkpoints; default: runs/<model>-<dataset>")
    args = parser.parse_args()
    check(parser, args)  # guard rail
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(f"--batch_size {args.batch_size} can't be shared by {world_size} processes: use {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # one rank of a node at a time
    args.run_dir = args.run_dir or f"runs/{args.model}-{args.dataset}"
    os.makedirs(args.run_dir, exist_ok=True)
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
