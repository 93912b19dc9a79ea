r"""Data parallelism with overlap: the gradients are on their way while backward() still computes.

manual_data_parallel.py sends all gradients after backward(), so no rank computes while they travel.
But backward() completes the gradients one after the other, from the last layer to the first. So the
gradients of the last layers can travel while backward() computes those of the first layers.

Overlap needs two things. A hook is a function that backward() calls as soon as the gradient of a
parameter is complete. And all_reduce(..., async_op=True) starts a message without waiting for it.
The class EachGradient does this with a message for each gradient. The class Buckets sends several
gradients in one message, because one long message takes less time than many short ones.

All ranks must start the same messages in the same order. For that, both classes expect that every
parameter gets a gradient, and that the gradients become complete in the same order on all ranks.
The exercise overlap_gradients.py drops both conditions.

Run it:
    python playground/overlapped_data_parallel.py -g 2
    python playground/overlapped_data_parallel.py -g 2 --by each
    python playground/overlapped_data_parallel.py -g 2 --width 256 --layers 16 \
        --bucket_cap_mb 1

It prints the numbers of single_gpu.py, up to rounding. Then it runs ten more steps in each of three
ways: with messages after backward(), with one for each gradient, and with buckets. The third
command prints (times will differ):
    rank  how         messages  done  backward (ms)  waiting (ms)  sum
    0     afterwards  34        0     3.83           47.88         51.71
    1     afterwards  34        0     3.85           44.83         48.67
    0     each        34        0     6.64           15.81         22.45
    1     each        34        1     8.67           14.42         23.09
    0     buckets     4         0     5.46           3.62          9.08
    1     buckets     4         3     5.43           2.35          7.78

"waiting" is the time from the end of backward() until all gradients are averaged. "done" is how
many messages of the last step have arrived when backward() ends. On CPUs, gloo's threads carry the
messages and use the same cores as backward(), so overlap makes backward() slower.

Try breaking it, in a copy (cp playground/overlapped_data_parallel.py playground/broken.py):
  1. Write `next(model.parameters()).requires_grad_(False)` after `send_weights(model)`, so that a
     parameter is frozen. What does PyTorch complain about? Let both classes skip such parameters.
  2. Comment out `handle.wait()` in Buckets.finish. What does the optimizer use then? Compare the
     losses.

Now write it yourself: overlap_gradients.py in playground/exercises/.

The next lesson, distributed_data_parallel.py, lets PyTorch do all of this.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import old_flags as flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet


class EachGradient:
    """Averages each gradient over the ranks, in a message of its own, while backward() computes."""

    def __init__(self, model):
        self.handles = []
        for parameter in model.parameters():
            # NEW: backward() calls self.start(parameter) as soon as parameter.grad is complete.
            parameter.register_post_accumulate_grad_hook(self.start)

    def start(self, parameter):
        """Start to average the gradient of a parameter, and return at once."""
        # Divide first: while the message travels, nothing may change the gradient.
        parameter.grad /= dist.get_world_size()
        # NEW: async_op=True returns a handle, and backward() continues.
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))

    def finish(self):
        """Wait for all messages. Call it between backward() and the optimizer's step."""
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


class Buckets:
    """The same with buckets: a message has the gradients of several parameters.

    Args:
        model: its parameters have the same dtype.
        bucket_cap_mb: a bucket is full as soon as it has this many MiB, as in DDP.
    """

    def __init__(self, model, bucket_cap_mb):
        self.buckets = []
        self.bucket_of = {}
        bucket = []
        # NEW: from the last layer on, because backward() completes the gradients in this order.
        for parameter in reversed(list(model.parameters())):
            bucket.append(parameter)
            self.bucket_of[parameter] = bucket
            parameter.register_post_accumulate_grad_hook(self.on_gradient)
            if sum(each.nbytes for each in bucket) >= bucket_cap_mb * 2**20:  # the bucket is full
                self.buckets.append(bucket)
                bucket = []
        if bucket:  # the last one is seldom full
            self.buckets.append(bucket)
        self.complete = set()  # the parameters whose gradients are complete in this step
        self.started = []  # the buckets whose messages have been started, and the messages
        self.handles = []

    def on_gradient(self, parameter):
        """Note that a gradient is complete. If its bucket is complete, start the message."""
        self.complete.add(parameter)
        bucket = self.bucket_of[parameter]
        if self.complete.issuperset(bucket):
            message = torch.cat([each.grad.flatten() for each in bucket])
            message /= dist.get_world_size()
            self.started.append((bucket, message))
            self.handles.append(dist.all_reduce(message, async_op=True))

    def finish(self):
        """Wait for all messages, and replace each gradient with its mean over the ranks."""
        if len(self.started) < len(self.buckets):
            raise RuntimeError("a parameter got no gradient, so its bucket was not sent")
        for (bucket, message), handle in zip(self.started, self.handles, strict=True):
            handle.wait()
            # torch.cat has copied the gradients, so the means are copied back.
            sizes = [parameter.numel() for parameter in bucket]
            for parameter, mean in zip(bucket, message.split(sizes), strict=True):
                parameter.grad.copy_(mean.view_as(parameter))
        self.complete.clear()
        self.started.clear()
        self.handles.clear()


def send_weights(model):
    """Give all ranks the parameters of rank 0, as in manual_data_parallel.py."""
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)


def average_gradients(model):
    """Average the gradients after backward(), as in manual_data_parallel.py."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


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
        backend,
        init_method=f"tcp://{args.ip}:{args.port}",  # rank 0 listens there
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


def run_epoch(model, loader, device, optimizer=None, averager=None):
    """Train, or only test if there is no optimizer. Returns sums over the images of all ranks."""
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()  # NEW: the hooks start messages in here
            averager.finish()  # NEW: from here on, each gradient is the mean over the ranks
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def now(device):
    """Return the time in seconds. GPU calls are asynchronous, so wait until they are done."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def show_overlap(how, args, batch, device):
    """Time ten steps, and count the messages of the last. Returns a row of the table."""
    images, labels = batch
    images = images.to(device)
    labels = labels.to(device)
    model = make_model(args).to(device)
    averager = None
    if how == "each":
        averager = EachGradient(model)
    if how == "buckets":
        averager = Buckets(model, args.bucket_cap_mb)
    backward_times = []
    waiting_times = []
    for _ in range(10):
        model.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        dist.barrier()  # all ranks start backward() together
        start = now(device)
        loss.backward()
        computed = now(device)
        if averager is None:
            messages = len(list(model.parameters()))
            done = 0
            average_gradients(model)
        else:
            messages = len(averager.handles)
            done = sum(handle.is_completed() for handle in averager.handles)
            averager.finish()
        waiting_times.append(now(device) - computed)
        backward_times.append(computed - start)
    backward_ms = 1000 * median(backward_times)
    waiting_ms = 1000 * median(waiting_times)
    counts = f"{dist.get_rank():<6}{how:<12}{messages:<10}{done:<6}"
    return f"{counts}{backward_ms:<15.2f}{waiting_ms:<14.2f}{backward_ms + waiting_ms:.2f}"


@explained  # guard rail: explains errors
def train(local_rank, args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(local_rank, args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed + rank)
    model = make_model(args).to(device)
    send_weights(model)
    if args.by == "each":
        averager = EachGradient(model)  # NEW: registers the hooks
    else:
        averager = Buckets(model, args.bucket_cap_mb)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer, averager)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    if rank == 0:
        print("rank  how         messages  done  backward (ms)  waiting (ms)  sum", flush=True)
    for how in ("afterwards", "each", "buckets"):
        rows = [None] * dist.get_world_size()
        dist.all_gather_object(rows, show_overlap(how, args, next(iter(train_loader)), device))
        if rank == 0:
            print(*rows, sep="\n", flush=True)
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
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    ways = ["each", "buckets"]
    add("--by", choices=ways, default="buckets", help="a message for each gradient, or buckets")
    # DDP's first bucket holds 1 MiB, and the others 25. The default model has 0.2 MiB of gradients,
    # so it would fit into one bucket, which is complete only when backward() ends.
    add("--bucket_cap_mb", type=float, default=0.01, help="MiB of gradients in a bucket")
    args = parser.parse_args()
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check(parser, args)  # guard rail: refuses impossible flags
    if not args.bucket_cap_mb > 0:
        parser.error(f"--bucket_cap_mb {args.bucket_cap_mb}: must be more than 0")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    meet(args)  # guard rail: finds the other nodes
    mp.spawn(train, (args,), args.gpus)


if __name__ == "__main__":
    main()
