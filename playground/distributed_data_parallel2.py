"""DistributedDataParallel with detectron2's helpers: launch starts the ranks, comm has collectives.

detectron2, by Facebook AI Research, contains two small modules that many projects borrow. `launch`
replaces two steps of distributed_data_parallel.py: it starts the processes of this node, and it
joins each of them to the process group. `comm` offers ranks and collectives under short names.
Most functions of `comm` also work in a single process that has no process group.

Run it (README.md has the command that installs detectron2):
    python playground/distributed_data_parallel2.py -g 2

Run it on two nodes, each command on its own node:
    python playground/distributed_data_parallel2.py -n 2 -g 2 -nr 0 -ip <ip of node 0>
    python playground/distributed_data_parallel2.py -n 2 -g 2 -nr 1 -ip <ip of node 0>

Run it with a random seed, which is the same on all ranks:
    python playground/distributed_data_parallel2.py -g 2 --random_seed

It prints (process ids, host and times will differ):
    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3961  train 88.27%  test 94.00%  1.12 s  53,396 images/s

These are the same numbers as in single_gpu.py, up to rounding. You get them with any number of
processes that divides --batch_size.

Try breaking it, in a copy:
  1. Call `comm.reduce_dict` with `average=True`. The loss and the accuracies stay right. Why? Which
     number is wrong now?
  2. Move `test_totals = comm.gather(test_sums)` into the `if comm.is_main_process():` below it, and
     run it with --timeout 10. Where does each rank wait?

The next lesson, distributed_data_parallel_torchrun.py, lets torchrun start the ranks.
"""

import argparse
import os
import platform
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
from common.guard_rails import check, explained
from common.models import MODELS
from common.roll_call import meet

try:
    # NEW: detectron2 uses parts of PyTorch that will be removed, and PyTorch would warn about each.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        from detectron2.engine import launch
        from detectron2.utils import comm
except ImportError:
    commit = "02b5c4e295e990042a714712c21dc79b731e8833"
    url = f"git+https://github.com/facebookresearch/detectron2.git@{commit}"
    sys.exit(f"error: detectron2 is missing: pip install --no-build-isolation '{url}'")


def join(args):
    """Print the table of ranks. Returns this rank and its device."""
    # NEW: launch has joined this process to the group already, and has selected its GPU.
    rank = comm.get_rank()
    local_rank = comm.get_local_rank()
    if args.device == "cuda":
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
        cores = max(1, torch.get_num_threads() // args.gpus)
        torch.set_num_threads(cores)  # the ranks of a node divide its cores among themselves
    row = f"{args.nr:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    rows = comm.all_gather(row)  # NEW: every rank gets a list of the Python objects of all ranks
    if comm.is_main_process():  # NEW: true on rank 0
        print("node  rank  local_rank  device  pid     host", *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns a tensor of three sums over the images of this rank: the losses, the images that were
    recognized, the images.
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
    return totals  # NEW: train() adds up the sums of all ranks, with functions of comm


@explained  # guard rail: explains errors
def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    world_size = comm.get_world_size()
    if args.random_seed:
        seed = comm.shared_random_seed()  # NEW: rank 0 draws it and sends it to all ranks
    else:
        seed = args.seed
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.manual_seed(seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    # NEW: pass world size and rank, because a single process has no group that knows them.
    sampler = DistributedSampler(train_set, world_size, rank, seed=seed, drop_last=True)
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
    plain_model = MODELS[args.model](args.width, args.layers).to(device)
    # NEW: launch forms no group for a single process, and DDP needs a group.
    if world_size > 1:
        model = DistributedDataParallel(plain_model)
    else:
        model = plain_model
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        # The order differs from epoch to epoch, and it is the same on all ranks and in each run.
        sampler.set_epoch(epoch)
        comm.synchronize()  # NEW: a barrier: each rank waits here for all others
        start = time.perf_counter()
        hidden = None if rank == 0 else True  # None: the bar is hidden if there is no terminal
        progress = tqdm(train_loader, leave=False, disable=hidden)
        loss_sum, hits, seen = run_epoch(model, progress, device, optimizer)
        sums = {"loss": loss_sum, "hits": hits, "seen": seen}
        # NEW: adds up the tensors of all ranks, name by name. Only rank 0 gets the result.
        sums = comm.reduce_dict(sums, average=False)
        loss_sum = sums["loss"].item()
        hits = sums["hits"].item()
        seen = sums["seen"].item()
        seconds = time.perf_counter() - start
        test_sums = run_epoch(plain_model, test_loader, device).tolist()
        # NEW: rank 0 gets a list of the Python objects of all ranks, the others an empty list.
        test_totals = comm.gather(test_sums)
        if comm.is_main_process():
            test_hits = sum(totals[1] for totals in test_totals)
            test_seen = sum(totals[2] for totals in test_totals)
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum / seen:.4f}"
                f"  train {hits / seen:.2%}  test {test_hits / test_seen:.2%}"
                f"  {seconds:.2f} s  {seen / seconds:,.0f} images/s",
                flush=True,
            )
        if comm.is_main_process() and args.savefile:
            state = {"model": plain_model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch + 1, "args": vars(args)}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state, file)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(f"{args.savefile}.tmp", args.savefile)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    if world_size > 1:
        dist.destroy_process_group()


@explained  # guard rail: explains errors
def main():
    """Read the flags and start the ranks of this node."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("-n", "--nodes", type=int, default=1, help="number of nodes")
    add("-g", "--gpus", type=int, help="processes on each node; default: its GPUs, or 2")
    add("-nr", "--nr", "-r", "--rank", type=int, default=0, help="number of this node (not a rank)")
    add("-ip", "--ip", default="127.0.0.1", help="address of node 0")
    add("--port", type=int, default=8888, help="port of node 0; with -n 1, any free port")
    add("--init_method", metavar="URL", help="replaces -ip, --port: tcp://... or env://")
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
    add("--random_seed", action="store_true", help="draw a random seed, and ignore --seed")
    add("-s", "--savefile", help="write a checkpoint to this file after each epoch")
    args = parser.parse_args()
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check(parser, args)  # guard rail: refuses impossible flags
    world_size = args.nodes * args.gpus
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(
            f"--batch_size {args.batch_size} cannot be divided by {world_size} processes:"
            f" use --batch_size {nearest}"
        )
    if args.init_method and args.init_method.startswith("file:"):
        parser.error("launch cannot rely on file://: use --init_method tcp://<ip of node 0>:8888")
    # The data is fetched once on each node, before its ranks start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    meet(args)  # guard rail: finds the other nodes
    # NEW: launch uses GPUs if any are visible. It joins the process group before it selects a GPU,
    # so NCCL guesses one from the rank. If more GPUs than processes are visible, the guess may be
    # wrong. So make as many GPUs visible as there are processes, and none with --device cpu.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        numbers = visible.split(",")
    else:
        numbers = [str(number) for number in range(torch.cuda.device_count())]
    needed = args.gpus if args.device == "cuda" else 0
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers[:needed])
    # NEW: starts the processes of this node, joins them to the group, and calls train(args) in
    # each of them.
    launch(
        train,
        args.gpus,
        args.nodes,
        args.nr,
        dist_url=args.init_method or f"tcp://{args.ip}:{args.port}",
        args=(args,),
        timeout=timedelta(seconds=args.timeout),
    )


if __name__ == "__main__":
    main()
