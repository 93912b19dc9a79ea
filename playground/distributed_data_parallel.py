"""DistributedDataParallel: one process for each GPU, on one machine or on many.

Run it:
    python playground/distributed_data_parallel.py -g 2

It prints the same numbers as `single_gpu.py`, up to rounding (process ids, host and times differ):
    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.12 s  53,396 images/s

DistributedDataParallel (DDP) is a wrapper around a model. It does what `manual_data_parallel.py`
and `overlapped_data_parallel.py` do by hand. At the start it sends the parameters of rank 0 to all
ranks. In backward() it collects the gradients in buckets, and starts the all_reduce of a bucket as
soon as all its gradients are complete. (The default model fits into one bucket, so nothing overlaps
here. `profile_steps.py` has several buckets.) DDP leaves two things to you: a sampler must give
each rank its part of every global batch, and the results must be summed over the ranks before rank
0 prints them.

On two nodes, each command on its own node:
    python playground/distributed_data_parallel.py -n 2 -g 2 -nr 0 -ip <ip of node 0>
    python playground/distributed_data_parallel.py -n 2 -g 2 -nr 1 -ip <ip of node 0>

Try breaking it, in a copy (cp playground/distributed_data_parallel.py playground/broken.py):
  1. Comment out `train_loader.sampler.set_epoch(epoch)`. Which order does each epoch have then?
     Compare the losses of the second epoch.
  2. Let only rank 0 test: write `if rank == 0:` before `_, test_correct, test_images = ...`. Where
     does each rank wait?
  3. Add `model.unused = torch.nn.Linear(1, 1).to(device)` after `model = make_model(args)...`. What
     does DDP complain about, and what does it suggest?
Now write `exact_accuracy.py`, and repair `fault_same_order.py`, `fault_too_many_images.py` and
`fault_cannot_load.py`, in playground/exercises/.
Builds on: overlapped_data_parallel.py
The next lesson, `distributed_data_parallel2.py`, starts the same training with detectron2.
"""

import math
import os
import platform
import socket
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find common/ from any folder
from common import flags
from common.data import fetch, load, whole_batch
from common.models import make_model


def train(local_rank, args):
    """Train as one of the ranks of this node."""
    rank, device = join(local_rank, args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    # NEW: DDP sends the parameters of rank 0 to all ranks. Many tutorials pass device_ids, which is
    # not needed: the model and the images are on this rank's device already. (If your model has
    # batch norm, read distributed_data_parallel_resnet.py.)
    model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    fit(model, optimizer, train_loader, test_loader, device, args)
    # NEW: DDP refers to the group, whose threads end only when nothing refers to it. So delete DDP
    # first. Otherwise the process may hang when Python ends (seen with PyTorch 2.9).
    del model
    dist.destroy_process_group()


# ---------- Nearly as in manual_data_parallel.py ----------
# Read only what is marked NEW.


def join(local_rank, args):
    """Join the process group, and print the table of ranks. Returns this rank and its device."""
    rank = args.nr * args.gpus + local_rank
    world_size = args.nodes * args.gpus
    device = torch.device(args.device)
    gpu = None
    if args.device == "cpu":  # the ranks of a node divide its cores among themselves
        torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))
    else:
        gpu = device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = args.backend or dist.get_default_backend_for_device(device)
    address = args.init_method or f"tcp://{args.ip}:{args.port}"  # rank 0 listens there
    wait = timedelta(seconds=args.timeout)  # for the start, and for each collective
    try:
        dist.init_process_group(backend, address, wait, world_size, rank, device_id=gpu)
    except dist.DistError as error:  # ranks are missing, or the port is taken
        error.add_note(
            f"All {world_size} ranks must connect to {address}:"
            " start every node, with the same -n, -g and -ip, and the same free --port."
        )
        raise
    row = f"{args.nr:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (row, vars(args)))
    for flag in vars(args).keys() - {"data_dir", "nr", "ip", "savefile"}:
        values = {str(theirs.get(flag)) for _, theirs in everyone}
        if len(values) > 1:
            dist.destroy_process_group()
            raise ValueError(f"the nodes differ in --{flag}: {', '.join(sorted(values))}")
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", flush=True)
        print(*[row for row, _ in everyone], sep="\n", flush=True)
    return rank, device


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
    # Each test image counts once. DistributedSampler would repeat some to make the parts equal.
    batches = torch.arange(len(test_set)).tensor_split(math.ceil(len(test_set) / 1000))
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    test_loader = DataLoader(test_set, batch_sampler=own_batches, **options)
    return train_loader, test_loader


def fit(model, optimizer, train_loader, test_loader, device, args):
    """Train and test, print one line for each epoch, and save."""
    rank = dist.get_rank()
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)
        loss, correct, images = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        speed = len(train_loader) * args.batch_size / seconds
        # NEW: test the model that DDP wraps, not DDP itself. DDP's forward() may send the model's
        # buffers, such as the running averages of batch norm, and then all ranks must call it the
        # same number of times.
        _, test_correct, test_images = run_epoch(model.module, test_loader, device)
        if rank == 0:
            digits = 12 if args.double else 4
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss / images:.{digits}f}"
                f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
                f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
                flush=True,
            )
        if rank == 0 and args.savefile:  # all ranks have the same model, so one saves it
            # NEW: model.module again, because the keys of DDP's own state begin with "module."
            save(args, epoch + 1, model.module, optimizer)


def save(args, epoch, model, optimizer):
    """Write a checkpoint, whole or not at all."""
    # NEW: if this fails, for example because the disk is full, the last checkpoint stays.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"epoch": epoch, "args": vars(args)}
    unfinished = Path(f"{args.savefile}.unfinished")
    try:
        with open(unfinished, "wb") as file:  # so that a full disk gives a clear error
            torch.save(state, file)
        os.replace(unfinished, args.savefile)
    finally:
        unfinished.unlink(missing_ok=True)  # left over only after an error


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
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


def main():
    """Read the flags and start the ranks of this node."""
    parser = flags.training(__doc__)
    add = parser.add_argument
    add("-n", "--nodes", type=flags.positive, default=1, help="number of nodes")
    add("-g", "--gpus", type=flags.positive, help="ranks of each node; default: its GPUs, or 2")
    add("-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", help="address of node 0")
    add("--port", type=flags.port, default=8888, help="port of node 0; -n 1 takes a free one")
    add("--init_method", metavar="URL", help="replaces -ip, --port: tcp://..., env://, file:///...")
    add("--backend", help="default: nccl on NVIDIA's GPUs, gloo on CPUs")
    add("--timeout", type=flags.positive, default=60, help="seconds to wait for another rank")
    add("-s", "--savefile", type=flags.new_file, help="a checkpoint, written after each epoch")
    args = parser.parse_args()
    found = torch.accelerator.device_count() if args.device != "cpu" else 2
    args.gpus = args.gpus or found
    parser.check_no_launcher()
    parser.check_nodes(args)
    parser.check_batch(args.batch_size, args.nodes * args.gpus)
    if args.nodes == 1 and not args.init_method:
        args.ip = "127.0.0.1"
        with socket.create_server((args.ip, 0)) as server:  # a port that is free now
            args.port = server.getsockname()[1]
    # The data is fetched once on each node, before its ranks start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    if args.device == "cpu":  # hide gloo's C++ back traces; Python raises the same errors
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        # Calls train(0, args), train(1, args) and so on, each in a process of its own.
        mp.spawn(train, (args,), args.gpus)
    except mp.ProcessRaisedException as error:
        sys.exit(str(error))  # the traceback of the rank that failed first
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for process in mp.active_children():
            process.kill()  # no rank outlives this process


if __name__ == "__main__":
    main()
