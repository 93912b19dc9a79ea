"""DistributedDataParallel with detectron2's helpers: launch starts the ranks, comm has collectives.

Read this lesson if your project uses detectron2, by Facebook AI Research, or has copied its modules
launch and comm. A new project does not need them. The next lesson starts the ranks with torchrun,
which comes with PyTorch.

`launch` replaces two steps of distributed_data_parallel.py: it starts the processes of this node,
and it joins each of them to the process group. `comm` offers ranks and collectives under short
names. Most functions of `comm` also work in a single process that has no process group.

Run it (the README.md of the course has the commands that install detectron2):
    python playground/distributed_data_parallel2.py -g 2

Run it on two nodes, each command on its own node:
    python playground/distributed_data_parallel2.py -n 2 -g 2 -nr 0 -ip <ip of node 0>
    python playground/distributed_data_parallel2.py -n 2 -g 2 -nr 1 -ip <ip of node 0>

It prints the table of ranks and the numbers of single_gpu.py, up to rounding (times will differ):
    epoch 1/3  loss 0.3961  train 88.27%  test 94.00%  1.12 s  53,396 images/s

Try breaking it, in a copy (cp playground/distributed_data_parallel2.py playground/broken.py):
  1. Call `comm.reduce_dict` with `average=True`. The loss and the accuracies stay right. Why? Which
     number is wrong now?
  2. Move `parts = comm.gather(test_sums)` into the `if comm.is_main_process():` below it, and run
     it with --timeout 10. Where does each rank wait?

The next lesson, distributed_data_parallel_torchrun.py, lets torchrun start the ranks.
"""

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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet

try:
    # detectron2 uses parts of PyTorch that will be removed, and PyTorch would warn about each.
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
    # NEW: every rank gets a list of the Python objects of all ranks.
    rows = comm.all_gather(rank_row(args.nr, rank, local_rank, device))
    if comm.is_main_process():  # NEW: true on rank 0
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns a tensor of three sums over the images of this rank: the loss, the number classified
    correctly, the number of images.
    """
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
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    return sums  # NEW: train() adds up the sums of all ranks, with functions of comm


@explained  # guard rail: explains errors
def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    world_size = comm.get_world_size()
    if args.random_seed:
        args.seed = comm.shared_random_seed()  # NEW: rank 0 draws it and sends it to all ranks
    train_loader, test_loader = loaders(args, rank, world_size)
    torch.manual_seed(args.seed)
    plain_model = make_model(args).to(device)
    # NEW: with one process, launch forms no group, but DDP needs one. So train the plain model.
    if world_size > 1:
        model = DistributedDataParallel(plain_model)
    else:
        model = plain_model
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        comm.synchronize()  # NEW: a barrier: each rank waits here for all others
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        loss, hits, images = run_epoch(model, progress, device, optimizer)
        # NEW: one way to add up the sums of all ranks. reduce_dict adds up tensors, name by name.
        # Only rank 0 gets the result, and only rank 0 prints it.
        sums = {"loss": loss, "hits": hits, "images": images}
        sums = comm.reduce_dict(sums, average=False)
        trained = [sums[name].item() for name in ("loss", "hits", "images")]
        seconds = time.perf_counter() - start
        test_sums = run_epoch(plain_model, test_loader, device).cpu()
        # NEW: another way. gather takes any Python object. Rank 0 gets a list of those of all
        # ranks, and the other ranks get an empty list.
        parts = comm.gather(test_sums)
        if comm.is_main_process():
            tested = sum(parts).tolist()
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    if world_size > 1:
        dist.destroy_process_group()


@explained  # guard rail: explains errors
def main():
    """Read the flags and start the ranks of this node."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("-n", "--nodes", type=int, default=1, help="number of nodes")
    add("-g", "--gpus", type=int, help="processes on each node; default: its GPUs, or 2")
    add("-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", default="127.0.0.1", help="address of node 0")
    add("--port", type=int, default=8888, help="port of node 0; -n 1 takes a free one")
    add("--init_method", metavar="URL", help="replaces -ip, --port: tcp://... or env://")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--random_seed", action="store_true", help="draw a random seed, and ignore --seed")
    args = parser.parse_args()
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check(parser, args)  # guard rail: refuses impossible flags
    if args.init_method and args.init_method.startswith("file:"):
        parser.error("launch cannot rely on file://: use --init_method tcp://<ip of node 0>:8888")
    # The data is fetched once on each node, before its ranks start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    meet(args)  # guard rail: finds the other nodes
    # NEW: launch uses NCCL if it finds a GPU, so --device cpu hides all GPUs. And launch joins the
    # group before it selects a GPU. If n GPUs are visible then, NCCL takes GPU number rank % n.
    # This is the local rank if n is the number of processes on this node, so no more are visible.
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
