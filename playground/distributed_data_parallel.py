"""DistributedDataParallel: one process for each GPU, on one machine or on many.

DistributedDataParallel (DDP) is a wrapper around a model. It does what manual_data_parallel.py and
overlapped_data_parallel.py do by hand. At the start it sends the parameters of rank 0 to all ranks.
In backward() it collects the gradients in buckets. As soon as all gradients of a bucket are there,
DDP starts its all_reduce, while backward() still computes the gradients of earlier layers. (The
default model fits into one bucket, so nothing overlaps here. profile_steps.py has several buckets.)

DDP leaves two things to you: a sampler must give each rank its part of every global batch, and the
results must be summed over the ranks before rank 0 prints them.

Run it:
    python playground/distributed_data_parallel.py -g 2

Run it on two nodes, each command on its own node:
    python playground/distributed_data_parallel.py -n 2 -g 2 -nr 0 -ip <ip of node 0>
    python playground/distributed_data_parallel.py -n 2 -g 2 -nr 1 -ip <ip of node 0>

It prints (process ids, host and times will differ):
    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3961  train 88.27%  test 94.00%  1.12 s  53,396 images/s

These are the numbers of single_gpu.py, up to rounding. (Here four more test images are right.) You
get them with any number of processes that divides --batch_size. With --double, the loss has the
same twelve digits.

Try breaking it, in a copy (cp playground/distributed_data_parallel.py playground/broken.py):
  1. Comment out `sampler.set_epoch(epoch)`. Which order does each epoch have then? Compare the
     losses of the second epoch.
  2. Let only rank 0 test: write `if rank == 0:` before `tested = run_epoch(...)`. Where does each
     rank wait?
  3. Add `model.unused = torch.nn.Linear(1, 1)` after `model = make_model(args)...`. What does DDP
     complain about, and what does it suggest?

Now write it yourself: exact_accuracy.py in playground/exercises/. Three programs there have a
fault: fault_same_order.py, fault_too_many_images.py and fault_cannot_load.py.

The next lesson, distributed_data_parallel2.py, starts the same training with detectron2's helpers.
"""

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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import old_flags as flags
from common.data import fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet


def join(local_rank, args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    rank = args.nr * args.gpus + local_rank
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
        cores = max(1, torch.get_num_threads() // args.gpus)
        torch.set_num_threads(cores)  # the ranks of a node divide its cores among themselves
    dist.init_process_group(
        args.backend or backend,
        init_method=args.init_method or f"tcp://{args.ip}:{args.port}",  # rank 0 listens there
        rank=rank,
        world_size=args.nodes * args.gpus,
        timeout=timedelta(seconds=args.timeout),  # for the start, and for each collective
        device_id=gpu,
    )
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, rank_row(args.nr, rank, local_rank, device))
    if rank == 0:
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over the images of all ranks: the loss, the number classified correctly, the
    number of images.
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
            loss.backward()  # NEW: DDP averages the gradients over all ranks in here
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


@explained  # guard rail: explains errors
def train(local_rank, args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(local_rank, args)
    world_size = dist.get_world_size()
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    # Each rank gets its own part of every global batch. All parts have the same size.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size
    # These data sets return whole batches, so there is nothing to collate. For your own data set,
    # leave collate_fn out, and set num_workers.
    options = {"collate_fn": whole_batch, "pin_memory": args.device == "cuda"}
    train_loader = DataLoader(train_set, per_rank_batch, sampler=sampler, drop_last=True, **options)
    # Each test image counts once. DistributedSampler would repeat some to make the parts equal.
    test_indices = range(rank, len(test_set), world_size)
    test_loader = DataLoader(test_set, 1000, sampler=test_indices, **options)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    # NEW: DDP sends the parameters of rank 0 to all ranks. It does not need device_ids, which many
    # tutorials pass, because the model and the images are on this rank's device already. (If your
    # model has batch norm, read distributed_data_parallel_resnet.py.)
    model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # each epoch has an order of its own, the same on all ranks
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        # NEW: test the plain model inside DDP. DDP's own forward() may send the model's buffers,
        # such as the running averages of batch norm. It could hang if some ranks had fewer test
        # batches than others. The plain model sends nothing.
        tested = run_epoch(model.module, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
        if rank == 0 and args.savefile:  # all ranks have the same model, so one saves it
            # NEW: model.module again, because the keys of DDP's own state begin with "module."
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch + 1, "args": vars(args)}
            unfinished = f"{args.savefile}.{time.time_ns()}"  # a name that no other job uses
            torch.save(state, unfinished)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(unfinished, args.savefile)
    # NEW: delete DDP before the group, because DDP uses it. Otherwise the process may hang here.
    del model
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
    add("--init_method", metavar="URL", help="replaces -ip, --port: tcp://..., env://, file:///...")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--backend", choices=["gloo", "nccl", "mpi"], help="default: nccl on GPUs, gloo on CPUs")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("-s", "--savefile", help="write a checkpoint to this file after each epoch")
    args = parser.parse_args()
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check(parser, args)  # guard rail: refuses impossible flags
    # The data is fetched once on each node, before its ranks start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    meet(args)  # guard rail: finds the other nodes
    # Calls train(0, args), train(1, args) and so on, each in a process of its own.
    mp.spawn(train, (args,), args.gpus)


if __name__ == "__main__":
    main()
