"""Data parallelism by hand: every rank has a copy of the model and a part of each batch.

Three things make several processes train like a single one:

  - They start with the same model, because rank 0 sends its parameters to all ranks (send_weights).
  - The global batch is all images of one step. Each rank computes the gradients for its own part of
    it. A sampler chooses the parts.
  - Before each step the ranks average their gradients (average_gradients). So every optimizer takes
    the same step, and the copies of the model stay equal.

A single process would take the same step. The loss is a mean over images, and all parts have the
same size. So the mean of the ranks' gradients is the gradient of the global batch.

Run it:
    python playground/manual_data_parallel.py -g 2                   # two processes
    python playground/manual_data_parallel.py -g 2 --weights send    # send and recv, no broadcast
    python playground/manual_data_parallel.py -g 2 --bucket          # all gradients in one message

Run it on two nodes, each command on its own node:
    python playground/manual_data_parallel.py -n 2 -g 2 -nr 0 -ip <ip of node 0>
    python playground/manual_data_parallel.py -n 2 -g 2 -nr 1 -ip <ip of node 0>

It prints (process ids, host and times will differ):
    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3961  train 88.27%  test 94.00%  3.54 s  16,938 images/s

These are the same numbers as in single_gpu.py, up to rounding. You get them with any number of
processes that divides --batch_size. (Rounding errors grow in training, so after an epoch a few
images may be recognized by one model only. With --double, the printed numbers are equal.)

Try breaking it, in a copy (cp playground/manual_data_parallel.py playground/broken.py):
  1. Comment out `send_weights(...)` in train. Do all ranks train the same model? Compare the losses
     with those of single_gpu.py.
  2. Comment out `average_gradients(...)` in run_epoch. Which model does each rank train? Compare
     the losses.

Now write it yourself: average_gradients.py in playground/exercises/. Three programs there have a
fault: fault_different_models.py, fault_wrong_gradient.py and fault_mixed_gradients.py.

The next lesson, overlapped_data_parallel.py, sends gradients while backward() computes others.
"""

import argparse
import os
import platform
import sys
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import MODELS
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
        torch.set_num_threads(cores)  # NEW: the ranks of a node divide its cores among themselves
    dist.init_process_group(
        args.backend or backend,
        init_method=args.init_method or f"tcp://{args.ip}:{args.port}",  # rank 0 listens there
        rank=rank,
        world_size=args.nodes * args.gpus,
        timeout=timedelta(seconds=args.timeout),  # for the start, and for each collective
        device_id=gpu,
    )
    row = f"{args.nr:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", *rows, sep="\n", flush=True)
    return rank, device


def send_weights(model, how):
    """Give all ranks the parameters (also called weights) and the buffers of rank 0.

    A model's buffer is a tensor that belongs to the model but is not trained, such as the running
    averages of batch norm. (It has nothing to do with the buffer of recv.) Each rank changes these
    averages in training, so they differ later. For that reason, DDP sends the buffers of rank 0
    again in each step. This lesson does not, because its models have no batch norm.
    """
    rank = dist.get_rank()
    # parameters() yields a parameter only once, even if two layers share it. state_dict() would
    # contain it twice, and would lack the buffers that a checkpoint leaves out.
    for tensor in [*model.parameters(), *model.buffers()]:
        numbers = tensor.detach()  # the same memory, without autograd
        # A backend can only send a tensor whose numbers lie in memory one after the other, in the
        # order of their indices. If they do, contiguous() returns the tensor itself. Otherwise it
        # returns a copy in this order.
        message = numbers.contiguous()
        if how == "broadcast":
            dist.broadcast(message, src=0)  # NEW: to all ranks; the backend chooses the route
        elif rank == 0:
            for other in range(1, dist.get_world_size()):
                dist.send(message, dst=other)  # NEW: to one rank after the other
        else:
            dist.recv(message, src=0)
        numbers.copy_(message)  # does nothing if there was no need for a copy


def gradients_on_any_rank(model):
    """Return the gradients of those parameters that have one on any rank.

    A parameter has no gradient (None) if it is frozen, or if forward() did not use it. If no rank
    has one, it stays None, because the optimizer skips such a parameter. If only some ranks have
    one, it becomes zero on the other ranks.
    """
    parameters = list(model.parameters())
    has_gradient = [parameter.grad is not None for parameter in parameters]
    # NEW: the ranks must make the same all_reduce calls in the same order. But no rank knows which
    # gradients exist on the others, so the ranks count them.
    # The price is a short message in each step. Python also waits, because a GPU must finish
    # backward() before Python can read the counts. DDP sends such a message only with
    # find_unused_parameters=True.
    counts = torch.tensor(has_gradient, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(counts)
    gradients = []
    for parameter, count in zip(parameters, counts.tolist(), strict=True):
        if count > 0 and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if count > 0:
            gradients.append(parameter.grad)
    return gradients


def average(gradients):
    """Replace each of these gradients with its mean over the ranks. They travel in one message."""
    message = torch.cat([gradient.flatten() for gradient in gradients])
    # Divide before the numbers are added, because their sum may be too large for float16.
    message /= dist.get_world_size()
    dist.all_reduce(message)  # NEW: now all ranks have the mean
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, message.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def average_gradients(model, in_one_bucket):
    """Average each gradient over the ranks. The result is the gradient of the global batch.

    Each gradient travels in a message of its own. With in_one_bucket, all of them travel in one
    message, because one long message takes less time than many short ones.
    """
    gradients = gradients_on_any_rank(model)
    if in_one_bucket:
        # All numbers of a message have the same dtype, so each dtype needs a bucket.
        buckets = defaultdict(list)
        for gradient in gradients:
            buckets[gradient.dtype].append(gradient)
        for bucket in buckets.values():
            average(bucket)
    else:
        for gradient in gradients:
            average([gradient])


def run_epoch(model, loader, device, optimizer=None, in_one_bucket=False):
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
            average_gradients(model, in_one_bucket)  # NEW: the gradient of the global batch
            optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)  # NEW: the sums over all ranks
    return totals.tolist()


@explained  # guard rail: explains errors
def train(local_rank, args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(local_rank, args)
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.manual_seed(args.seed + rank)  # NEW: the models differ, so send_weights is needed
    train_set, test_set = load(args.dataset, args.data_dir)
    # NEW: the order of the images is that of single_gpu.py, because both samplers call
    # torch.randperm with a generator whose seed is args.seed + epoch. Of n ranks, rank r gets the
    # images at the positions r, r + n, r + 2n and so on. So the k-th batches of all ranks together
    # are the k-th batch of single_gpu.py. If n does not divide the number of images, drop_last
    # leaves out the last ones. (The drop_last of DataLoader leaves out a batch that is not full.)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size  # NEW: --batch_size is the global batch
    pin_memory = device.type == "cuda"  # a GPU copies from pinned memory while Python continues
    train_loader = DataLoader(
        train_set,
        per_rank_batch,
        sampler=sampler,
        drop_last=True,
        collate_fn=whole_batch,  # common/data.py's data sets return whole batches already
        pin_memory=pin_memory,
    )
    # NEW: each test image counts once. DistributedSampler would repeat some to make the parts
    # equal.
    test_indices = range(rank, len(test_set), world_size)
    test_loader = DataLoader(
        test_set, 1000, sampler=test_indices, collate_fn=whole_batch, pin_memory=pin_memory
    )
    model = MODELS[args.model](args.width, args.layers).to(device)
    send_weights(model, args.weights)  # NEW: from here on, all ranks have the model of rank 0
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        # NEW: the order differs from epoch to epoch. It is the same on all ranks and in each run.
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        hidden = None if rank == 0 else True  # None: the bar is hidden if there is no terminal
        progress = tqdm(train_loader, leave=False, disable=hidden)
        loss_sum, hits, seen = run_epoch(model, progress, device, optimizer, args.bucket)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, device)
        if rank == 0:  # NEW: one line for all ranks, not one from each
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum / seen:.4f}"
                f"  train {hits / seen:.2%}  test {test_hits / test_seen:.2%}"
                f"  {seconds:.2f} s  {seen / seconds:,.0f} images/s",
                flush=True,
            )
        if rank == 0 and args.savefile:  # NEW: all ranks have the same model, so one saves it
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch + 1, "args": vars(args)}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state, file)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(f"{args.savefile}.tmp", args.savefile)
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
    add("-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", default="127.0.0.1", help="address of node 0")
    add("--port", type=int, default=8888, help="port of node 0; with -n 1, any free port")
    add("--init_method", metavar="URL", help="replaces -ip, --port: tcp://..., env://, file:///...")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--backend", choices=["gloo", "nccl", "mpi"], help="default: nccl on GPUs, gloo on CPUs")
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
    add("--weights", choices=["broadcast", "send"], default="broadcast", help="how rank 0 sends")
    add("--bucket", action="store_true", help="average all gradients in one all_reduce")
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
    # The data is fetched once on each node, before its ranks start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    meet(args)  # guard rail: finds the other nodes
    # Calls train(0, args), train(1, args) and so on, each in a process of its own.
    mp.spawn(train, (args,), args.gpus)


if __name__ == "__main__":
    main()
