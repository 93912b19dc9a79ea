"""DistributedDataParallel with detectron2's helpers: launch starts the processes, comm talks to them.

Facebook AI Research's detectron2 has two small modules that many projects borrow. `launch` does what mp.spawn and join
did in distributed_data_parallel.py: it starts the processes of this node, gives them their ranks and forms the process
group. `comm` has the ranks and the collectives under short names, and most of them work with a single process, too.

    python playground/distributed_data_parallel2.py -g 2
    python playground/distributed_data_parallel2.py -n 2 -g 2 -r 0 -ip <ip of node 0>    # and on node 1 with -r 1
    python playground/distributed_data_parallel2.py --random_seed    # another seed in each run, one for all ranks

-r is the number of the node, which launch calls machine_rank. The numbers are those of single_gpu.py, for any number of
processes that divides --batch_size, up to rounding (pid, host and times will differ):

    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.54 s  38,900 images/s

Break it, in a copy:
  1. Call comm.reduce_dict with average=True: loss and accuracy stay right. Why? And what is wrong now?
  2. Call comm.gather(...) only `if comm.is_main_process()`, with --timeout 10. Where does each rank wait?
"""

import argparse
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS

try:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # it uses parts of torch that will go
        from detectron2.engine import launch
        from detectron2.utils import comm
except ImportError:
    url = "git+https://github.com/facebookresearch/detectron2.git@02b5c4e295e990042a714712c21dc79b731e8833"
    sys.exit(f"error: detectron2 is missing: pip install --no-build-isolation '{url}'")


def join(args):
    """Print who is who. Returns the device of this process."""
    local_rank = comm.get_local_rank()  # NEW: launch has formed the group, and made this the current GPU
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))  # the ranks share the cores
    me = f"{args.nr:<6}{comm.get_rank():<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{os.uname().nodename}"
    everyone = comm.all_gather(me)  # NEW: any Python object, from all to all
    if comm.is_main_process():
        print("node  rank  local_rank  device  pid     host", *everyone, sep="\n", flush=True)
    return device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or test without an optimizer. Returns sums over the images of this rank: loss, hits, images."""
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
    return torch.tensor([loss_sum, hits, seen], dtype=torch.float64, device=device)


def train(args):
    """Train, test and report, one line an epoch."""
    device, rank, world_size = join(args), comm.get_rank(), comm.get_world_size()
    seed = comm.shared_random_seed() if args.random_seed else args.seed  # NEW: drawn by rank 0, told to all
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    sampler = DistributedSampler(train_set, world_size, rank, seed=seed, drop_last=True)
    share = args.batch_size // world_size
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    mine = range(rank, len(test_set), world_size)  # no padding: each test image counts exactly once
    test_loader = DataLoader(test_set, 1000, sampler=mine, **options)
    plain = MODELS[args.model](args.width, args.layers).to(device)
    model = DistributedDataParallel(plain) if world_size > 1 else plain  # NEW: launch makes no group for one
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        comm.synchronize()  # NEW: a barrier, so that all clocks start together
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        totals = dict(zip(("loss", "hits", "seen"), run_epoch(model, bar, device, optimizer), strict=True))
        totals = comm.reduce_dict(totals, average=False)  # NEW: sums over all ranks, on rank 0
        loss, hits, seen = (totals[name].item() for name in ("loss", "hits", "seen"))
        seconds = time.perf_counter() - start
        tests = comm.gather(run_epoch(plain, test_loader, device).tolist())  # NEW: a list on rank 0, else empty
        if comm.is_main_process():
            _, test_hits, test_seen = (sum(column) for column in zip(*tests, strict=True))
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        if comm.is_main_process() and args.savefile:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole
    if world_size > 1:
        dist.destroy_process_group()


def main():
    """Read the flags and start this node's ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("-n", "--nodes", type=int, default=1, help="machines")
    add("-g", "--gpus", type=int, help="processes on each; default: its GPUs, or 2")
    add(
        "-r",
        "--rank",
        "-nr",
        "--nr",
        dest="nr",
        type=int,
        default=0,
        help="number of this machine, from 0: machine_rank",
    )
    add("-ip", "--ip", default="127.0.0.1", help="address of machine 0")
    add("--port", type=int, default=8888, help="of machine 0; a single machine chooses a free one")
    add("--init_method", metavar="URL", help="tcp://... or env:// in place of -ip and --port")
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
    add("--random_seed", action="store_true", help="draw a seed instead of --seed")
    add("-s", "--savefile", help="write a checkpoint here after each epoch")
    args = parser.parse_args()
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check(parser, args)  # guard rail
    world_size = args.nodes * args.gpus
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(f"--batch_size {args.batch_size} can't be shared by {world_size} processes: use {nearest}")
    if (args.init_method or "").startswith("file://"):
        parser.error("launch does not meet reliably by file:// over several nodes: use --init_method tcp://<ip>:8888")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # once per node, before its ranks start
    meet(args)  # guard rail
    # NEW: launch uses the GPUs that it sees: show it one for each process, and none for --device cpu
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: args.gpus]) if args.device == "cuda" else ""
    # NEW: starts the ranks, forms the group and calls train(args) in each
    url, wait = args.init_method or f"tcp://{args.ip}:{args.port}", timedelta(seconds=args.timeout)
    launch(train, args.gpus, args.nodes, args.nr, dist_url=url, args=(args,), timeout=wait)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
