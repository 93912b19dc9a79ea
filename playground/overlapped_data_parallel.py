"""Data parallelism with overlap: the gradients are on their way while backward() still computes.

manual_data_parallel.py starts to average the gradients after backward(). Until backward() ends, no
message travels. From then on, no rank computes. But backward() computes the gradients one after the
other, from the last layer to the first. So the gradients of the last layers can travel while
backward() computes those of the first layers. This is how DistributedDataParallel hides most of its
messages.

It takes three things:

  - A hook for each parameter, which is a function that backward() calls as soon as the gradient of
    this parameter is complete.
  - Buckets, because one long message takes less time than many short ones. Each bucket holds
    several parameters. The buckets are fixed before training, and the last parameters come first.
  - Messages that do not block. all_reduce(..., async_op=True) returns a handle at once, which is
    like the requests of nonblocking_p2p.py. handle.wait() waits until the message is complete. The
    optimizer must wait for all handles.

All ranks must start the same messages in the same order. But if forward() uses different layers on
different ranks, one rank may fill bucket 2 first, and another rank may fill bucket 1 first. So a
bucket is started only if all buckets before it have been started.

Run it:
    python playground/overlapped_data_parallel.py -g 2
    python playground/overlapped_data_parallel.py -g 2 --width 1024 --bucket_cap_mb 1

Run it on two nodes, each command on its own node:
    python playground/overlapped_data_parallel.py -n 2 -g 2 -nr 0 -ip <ip of node 0>
    python playground/overlapped_data_parallel.py -n 2 -g 2 -nr 1 -ip <ip of node 0>

It prints (process ids, host and times will differ):
    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3961  train 88.27%  test 94.00%  1.61 s  37,233 images/s

Then it prints what it counted and measured in twenty more steps, here for the second command (times
will differ):
    rank  overlap  messages  early  backward (ms)  waiting (ms)
    0     False    6         0      6.84           17.20
    0     True     6         5      12.76          8.09
    1     False    6         0      6.78           16.43
    1     True     6         5      13.31          6.95

"early" counts the messages that started while backward() still computed gradients. The last message
is never early, because it has the gradients that backward() computes last. "waiting" is the time
from the end of backward() until all gradients are averaged. On CPUs, gloo's threads carry the
messages, and they use the same cores as backward(). So early messages make backward() slower. But
both times together are shorter with overlap.

Try breaking it, in a copy:
  1. Start each bucket as soon as it is full: in `on_gradient`, replace the loop with `bucket =
     self.bucket_of[parameter]` and `if bucket.missing == 0: self.start(bucket)`. With this model,
     the numbers stay right. With which model would they be wrong?
  2. Comment out `bucket.handle.wait()`. What does the optimizer use then? Compare the losses.

Now write it yourself: overlap_gradients.py in playground/exercises/.

The next lesson, distributed_data_parallel.py, lets PyTorch do all of this.
"""

import argparse
import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

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
        torch.set_num_threads(cores)  # the ranks of a node divide its cores among themselves
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


def send_weights(model):
    """Give all ranks the parameters and the buffers of rank 0, as in manual_data_parallel.py."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor = tensor.detach()
        message = tensor.contiguous()
        dist.broadcast(message, src=0)
        tensor.copy_(message)


class Bucket:
    """Parameters whose gradients travel in one message."""

    def __init__(self):
        self.parameters = []
        self.bytes = 0
        self.missing = 0  # how many gradients of this step have not been computed yet
        self.message = None
        self.handle = None


class Buckets:
    """All parameters of a model in buckets. A bucket is sent when all its gradients are ready.

    Call finish() between backward() and the optimizer's step. Afterwards each gradient is the mean
    over the ranks. Between two calls to finish(), call backward() once.

    It works for any model. If no rank has a gradient for a parameter, its gradient stays None. If
    only some ranks have one, it counts as zero on the other ranks. So start() sends zeros for a
    missing gradient, and a flag for each parameter: 1 if there is a gradient, and 0 if not. If no
    gradient could be missing, torch.cat, a division and all_reduce would be enough.
    """

    def __init__(self, model, bucket_cap_mb):
        self.overlap = True  # False: start all messages after backward(), for comparison
        self.buckets = []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # NEW: the last parameters come first, because backward() computes their gradients first.
        for parameter in reversed(trained):
            bucket = self.bucket_for(parameter, bucket_cap_mb * 2**20)
            bucket.parameters.append(parameter)
            bucket.bytes += parameter.nbytes
        self.bucket_of = {}
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self.bucket_of[parameter] = bucket
                # NEW: backward() calls on_gradient(parameter) when parameter.grad is complete.
                parameter.register_post_accumulate_grad_hook(self.on_gradient)
        self.begin()

    def bucket_for(self, parameter, capacity):
        """Return the last bucket if the parameter fits into it, and a new bucket otherwise."""
        if self.buckets:
            last = self.buckets[-1]
            same_dtype = last.parameters[0].dtype == parameter.dtype  # a message has one dtype
            if same_dtype and last.bytes + parameter.nbytes <= capacity:
                return last
        self.buckets.append(Bucket())
        return self.buckets[-1]

    def begin(self):
        """Get ready for a step, in which all gradients are missing at first."""
        self.started = 0  # how many messages have been started
        self.started_early = 0  # how many of them while gradients were still missing
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            bucket.message = None  # frees its memory
            bucket.handle = None

    def on_gradient(self, parameter):
        """Count a gradient that is complete, and start the next buckets if they are ready."""
        self.bucket_of[parameter].missing -= 1
        # NEW: only the next bucket may start, so that all ranks start them in the same order.
        while self.overlap and self.started < len(self.buckets):
            bucket = self.buckets[self.started]
            if bucket.missing > 0:
                break
            self.start(bucket)

    def start(self, bucket):
        """Start the message of a bucket, and return at once."""
        self.started += 1
        if any(each.missing > 0 for each in self.buckets):
            self.started_early += 1
        parts = []
        flags = []
        for parameter in bucket.parameters:
            if parameter.grad is None:
                parts.append(torch.zeros_like(parameter).flatten())
                flags.append(0.0)
            else:
                parts.append(parameter.grad.flatten())
                flags.append(1.0)
        # The flags travel with the gradients. A sum above 0 means that some rank has a gradient.
        parts.append(parts[0].new_tensor(flags))
        bucket.message = torch.cat(parts)  # one message is one tensor
        bucket.message /= dist.get_world_size()  # the sum over the ranks is then the mean
        # NEW: async_op=True starts the message and returns a handle.
        bucket.handle = dist.all_reduce(bucket.message, async_op=True)

    def finish(self):
        """Start the other messages, wait for all, and replace the gradients with their means.

        Returns how many messages were started while backward() still computed gradients.
        """
        started_early = self.started_early
        # With overlap, these buckets have not been started, because a parameter in them, or in a
        # bucket before them, got no gradient on this rank. Without overlap, these are all of the
        # buckets. They are sent now, because the other ranks wait for them.
        for bucket in self.buckets[self.started :]:
            self.start(bucket)
        for bucket in self.buckets:
            bucket.handle.wait()
            sizes = [parameter.numel() for parameter in bucket.parameters]
            parts = bucket.message.split([*sizes, len(sizes)])
            means = parts[:-1]  # one for each parameter
            flags = parts[-1]  # start() has put them at the end
            # Reading the flags makes Python wait for the GPU. By default, DDP sends no flags, and
            # ends with an error if a parameter got no gradient.
            for parameter, mean, flag in zip(bucket.parameters, means, flags.tolist(), strict=True):
                if flag > 0:
                    if parameter.grad is None:
                        parameter.grad = torch.empty_like(parameter)
                    parameter.grad.copy_(mean.view_as(parameter))
        self.begin()
        return started_early


def run_epoch(model, loader, device, optimizer=None, buckets=None):
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
            loss.backward()  # NEW: starts the messages of the buckets that it fills
            buckets.finish()  # NEW: from here on, each gradient is the mean over the ranks
            optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    return totals.tolist()


def now(device):
    """Return the time in seconds. GPU calls are asynchronous, so wait until they are done."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def show_overlap(model, buckets, batch, device):
    """Count and time the messages of ten steps without overlap, and of ten steps with it."""
    images, labels = batch
    images = images.to(device)
    labels = labels.to(device)
    rows = []
    for overlap in (False, True):
        buckets.overlap = overlap
        backward_times = []
        waiting_times = []
        for _ in range(10):
            model.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            dist.barrier()  # all ranks start backward() together
            start = now(device)
            loss.backward()
            computed = now(device)
            early = buckets.finish()
            waiting_times.append(now(device) - computed)
            backward_times.append(computed - start)
        backward_ms = 1000 * median(backward_times)
        waiting_ms = 1000 * median(waiting_times)
        row = f"{dist.get_rank():<6}{overlap!s:<9}{len(buckets.buckets):<10}{early:<7}"
        rows.append(f"{row}{backward_ms:<15.2f}{waiting_ms:.2f}")
    rows_of_all = [None] * dist.get_world_size()
    dist.all_gather_object(rows_of_all, rows)
    if dist.get_rank() == 0:
        print("rank  overlap  messages  early  backward (ms)  waiting (ms)")
        for rows in rows_of_all:
            print(*rows, sep="\n", flush=True)


@explained  # guard rail: explains errors
def train(local_rank, args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(local_rank, args)
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.manual_seed(args.seed + rank)
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
    send_weights(model)
    buckets = Buckets(model, args.bucket_cap_mb)  # NEW: registers the hooks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        # The order differs from epoch to epoch, and it is the same on all ranks and in each run.
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        hidden = None if rank == 0 else True  # None: the bar is hidden if there is no terminal
        progress = tqdm(train_loader, leave=False, disable=hidden)
        loss_sum, hits, seen = run_epoch(model, progress, device, optimizer, buckets)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum / seen:.4f}"
                f"  train {hits / seen:.2%}  test {test_hits / test_seen:.2%}"
                f"  {seconds:.2f} s  {seen / seconds:,.0f} images/s",
                flush=True,
            )
        if rank == 0 and args.savefile:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch + 1, "args": vars(args)}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state, file)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(f"{args.savefile}.tmp", args.savefile)
    show_overlap(model, buckets, next(iter(train_loader)), device)
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
    add("--bucket_cap_mb", type=float, default=0.05, help="MiB of gradients in a bucket")
    add("-s", "--savefile", help="write a checkpoint to this file after each epoch")
    args = parser.parse_args()
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check(parser, args)  # guard rail: refuses impossible flags
    if not args.bucket_cap_mb > 0:
        parser.error(f"--bucket_cap_mb {args.bucket_cap_mb}: must be more than 0")
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
