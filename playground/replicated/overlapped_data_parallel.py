"""Data parallelism with overlap: the gradients travel while `backward()` still computes.

Run it:
    python playground/replicated/overlapped_data_parallel.py -g 2

It prints the same numbers as `single_gpu.py`, up to rounding. Then it times ten steps with each of
four ways to average the gradients (times differ much from run to run):
    rank  how         backward (ms)  waiting (ms)  sum
    0     afterwards  0.57           5.57          6.14
    1     afterwards  0.55           5.97          6.52
    0     one bucket  0.81           0.46          1.26
    1     one bucket  0.86           0.38          1.24
    0     each        1.33           3.25          4.57
    1     each        1.15           4.03          5.19
    0     buckets     1.54           1.35          2.89
    1     buckets     1.08           1.46          2.54

With "afterwards" (`manual_data_parallel.py`), and in a single message with "one bucket", the
gradients are sent after `backward()`, and no rank computes while they travel. But `backward()`
completes the last layers' gradients first, so these can travel while it computes the rest. That
takes a hook, a function that `backward()` calls as soon as a gradient is complete, and
`all_reduce(..., async_op=True)`, which starts a message without waiting for it. With "each", every
gradient has a message of its own. A bucket sends several gradients in one message, here in three
("buckets"). (DDP works with buckets, too: `playground/pages/figures/overlap.svg` draws its step.)

This model is so small that the number of messages decides: one late message is faster than the
three early ones of "buckets". Overlap pays if messages are long: with `--width 1024 --batch_size
512`, two cores took 50 ms with one bucket, and 37 with "each" (medians of three runs; with
`--bucket_cap_mb 4`, "buckets" took 47). It pays more on GPUs, because there a message takes few of
a GPU's processors; gloo's threads use the same cores as `backward()`.

All ranks must start the same messages in the same order. Here they do, because every parameter gets
a gradient, and `backward()` completes the gradients in the same order on all ranks.

Try breaking it, in a copy beside it:
  1. In `run_epoch()`, write `loss.backward(retain_graph=True)` above `loss.backward()`, as when
     gradients are accumulated. What does the error prevent?
  2. Comment out `self.handle.wait()`. What does the optimizer use then? Compare the losses.
Builds on: manual_data_parallel.py
The next lesson, `resnet.py`, trains a larger model on colour images.
"""

import math
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
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


class Bucket:
    """Averages the gradients of several parameters, in one message.

    The message starts as soon as the last of these gradients is complete.
    """

    def __init__(self, parameters):
        self.parameters = parameters
        self.complete = set()  # the parameters whose gradients are complete in this step
        for parameter in parameters:
            # NEW: backward() calls self.count(parameter) as soon as parameter.grad is complete.
            parameter.register_post_accumulate_grad_hook(self.count)

    def count(self, parameter):
        """Count a complete gradient. After the bucket's last one, start the message."""
        if parameter in self.complete:  # a gradient must not change after it was sent
            raise RuntimeError("call finish() after each backward()")
        self.complete.add(parameter)
        if len(self.complete) == len(self.parameters):
            self.message = torch.cat([each.grad.flatten() for each in self.parameters])
            self.message /= dist.get_world_size()
            # NEW: async_op=True returns a handle, and backward() continues.
            self.handle = dist.all_reduce(self.message, async_op=True)

    def finish(self):
        """Wait for the message, and copy its means into the gradients."""
        if len(self.complete) < len(self.parameters):
            raise RuntimeError("a parameter of this bucket has got no gradient in this step")
        self.handle.wait()
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, mean in zip(self.parameters, self.message.split(sizes), strict=True):
            parameter.grad.copy_(mean.view_as(parameter))
        self.complete.clear()


class Buckets:
    """All parameters in buckets, because a few long messages take less time than many short ones.

    A bucket is full as soon as it has bucket_cap_mb MiB, as in DDP.
    """

    def __init__(self, model, bucket_cap_mb):
        self.buckets = []
        parameters = []
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # NEW: the last layer comes first, because backward() completes the gradients in this order.
        for parameter in reversed(trained):
            parameters.append(parameter)
            if sum(each.nbytes for each in parameters) >= bucket_cap_mb * 2**20:  # full
                self.buckets.append(Bucket(parameters))
                parameters = []
        if parameters:  # the last bucket is seldom full
            self.buckets.append(Bucket(parameters))

    def finish(self, model):
        """Wait for all messages. run_epoch() calls this as average(model), after backward()."""
        sent = {parameter for bucket in self.buckets for parameter in bucket.parameters}
        if any(each.grad is not None and each not in sent for each in model.parameters()):
            raise RuntimeError(
                "a gradient was not sent: after unfreezing a layer, make new Buckets"
            )
        for bucket in self.buckets:
            bucket.finish()


def train(local_rank, args):
    """As one of the ranks, train, and then compare four ways to average the gradients."""
    rank, device = join(local_rank, args)
    # loaders() of distributed_data_parallel_torchrun.py. Most later lessons import it, too.
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed + rank)
    model = make_model(args).to(device)
    send_weights(model)
    buckets = Buckets(model, args.bucket_cap_mb)  # NEW: starts messages during backward()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args, buckets.finish)
    show_overlap(next(iter(train_loader)), device, args)
    dist.destroy_process_group()


def add_flags(parser):
    """Add the flag that only this lesson has."""
    # DDP's first bucket has 1 MiB, and the others 25. The default model has only 0.2 MiB of
    # gradients. In a single bucket, they would be complete only when backward() ends.
    size = "MiB of gradients in a bucket"
    parser.add_argument("--bucket_cap_mb", type=flags.number, default=0.01, help=size)


# You can stop here: what follows only measures and prints.


def show_overlap(batch, device, args):
    """Time ten steps with each way, and print a row from each rank."""
    rows = [None] * dist.get_world_size()
    if dist.get_rank() == 0:
        print("rank  how         backward (ms)  waiting (ms)  sum", flush=True)
    for how in ("afterwards", "one bucket", "each", "buckets"):
        dist.all_gather_object(rows, time_steps(how, batch, device, args))
        if dist.get_rank() == 0:
            print(*rows, sep="\n", flush=True)


def time_steps(how, batch, device, args):
    """Time backward(), and what is left to do after it. Returns a row with the medians."""
    images = batch[0].to(device)
    labels = batch[1].to(device)
    model = make_model(args).to(device)
    average = average_gradients  # afterwards, without hooks
    # One bucket is complete when backward() ends, so nothing overlaps. "each": a gradient fills it.
    caps = {"one bucket": math.inf, "each": 0, "buckets": args.bucket_cap_mb}
    if how in caps:
        average = Buckets(model, caps[how]).finish
    backward_times = []
    waiting_times = []
    for _ in range(10):
        model.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        dist.barrier()  # all ranks start backward() together
        start = now(device)
        loss.backward()
        computed = now(device)
        average(model)
        waiting_times.append(now(device) - computed)
        backward_times.append(computed - start)
    backward = 1000 * median(backward_times)
    waiting = 1000 * median(waiting_times)
    times = f"{backward:<15.2f}{waiting:<14.2f}{backward + waiting:.2f}"
    return f"{dist.get_rank():<6}{how:<12}{times}"


def now(device):
    """Return the time in seconds. GPU calls are asynchronous, so wait until they are done."""
    if device.type != "cpu":
        torch.accelerator.current_stream().synchronize()
    return time.perf_counter()


# ---------- Unchanged from manual_data_parallel.py ----------
# You know what follows: send_weights(), average_gradients(), join(), fit_epoch(), run_epoch() and
# main(). If you copy this lesson, copy this, too.


def send_weights(model):
    """Give all ranks the parameters (also called weights) of rank 0.

    A model may also have tensors that are not trained, such as the running averages of batch norm.
    PyTorch calls them buffers, and they would have to be sent, too. What gloo sends must be
    contiguous: it ignores strides, so a column of a matrix would arrive with wrong numbers.
    """
    for parameter in model.parameters():
        # Rank 0 sends, and the other ranks receive into their own parameters. detach() shares
        # the parameter's memory, and keeps autograd from recording the call.
        dist.broadcast(parameter.detach(), src=0)


def average_gradients(model):
    """Replace each gradient with its mean over the ranks, which is the global batch's gradient.

    All ranks must have gradients for the same parameters, so that they send the same messages. (The
    exercise average_gradients.py lifts this condition.)
    """
    for parameter in model.parameters():
        if parameter.grad is not None:  # a frozen parameter has none
            dist.all_reduce(parameter.grad)  # the sum over all ranks
            parameter.grad /= dist.get_world_size()


def join(local_rank, args):
    """Join the process group (all ranks), and print a table of it. Returns the rank and device."""
    rank = args.nr * args.gpus + local_rank  # the nodes before this one have args.gpus ranks each
    world_size = args.nodes * args.gpus
    torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))  # they share the cores
    device, gpu = torch.device(args.device), None  # gpu stays None on a CPU
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    address = f"tcp://{args.ip}:{args.port}"
    try:
        # All ranks make this call, and wait in it for each other. Then they can send messages.
        dist.init_process_group(
            # the library that carries messages: NCCL between NVIDIA's GPUs, gloo between CPUs
            backend=dist.get_default_backend_for_device(device),
            init_method=address,  # the rendezvous: rank 0 waits there (listens), others connect
            world_size=world_size,  # how many ranks there are on all nodes together
            rank=rank,  # which of them this process is: no two have the same number
            timeout=timedelta(seconds=args.timeout),  # for this call, and for each later message
            device_id=gpu,  # with it, NCCL starts now, and not at the first message
        )
    except RuntimeError as error:  # ranks are missing, or do not connect, or the port is taken
        hint = f"All {world_size} ranks must connect to {address}: start every node, with the same"
        hint += " -n, -g and -ip, and the same free --port. If gloo cannot connect, export"
        error.add_note(f"{hint} GLOO_SOCKET_IFNAME=<network interface>, such as eth0.")
        raise
    row = f"{args.nr:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    everyone = [None] * world_size
    # Each rank gets the objects of all ranks: a row of the table, and the flags.
    dist.all_gather_object(everyone, (row, vars(args)))
    flags.check_same([theirs for _, theirs in everyone])  # an error, if the nodes' flags differ
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", flush=True)
        print(*[row for row, _ in everyone], sep="\n", flush=True)
    return rank, device


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args, average):
    """Train for one epoch, test, and print a line."""
    rank = dist.get_rank()
    train_loader.sampler.set_epoch(epoch)  # without this, all epochs have the same order
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, images = run_epoch(model, bar, device, optimizer, average)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    if rank == 0:  # one line for all ranks
        digits = 12 if args.double else 4
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
            flush=True,
        )


def run_epoch(model, loader, device, optimizer=None, average=None):
    """Train, or with no optimizer, test. Returns sums over all ranks: loss, correct, images."""
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
            average(model)  # from here on, each gradient is that of the global batch
            optimizer.step()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    # The sums over all ranks. (A mean of the ranks' means would be wrong if one has fewer.)
    dist.all_reduce(sums)
    return sums.tolist()


def main():
    """Read the flags, and start the processes of this node."""
    parser = flags.ranks(__doc__)  # --model, --dataset, --epochs, --timeout and so on
    add = parser.add_argument
    add("-n", "--nodes", type=flags.positive, default=1, help="number of nodes")
    add("-g", "--gpus", type=flags.positive, help="ranks of each node; default: its GPUs, or 2")
    add("-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", help="address of node 0")
    add("--port", type=flags.port, default=29500, help="port of node 0; one node takes a free one")
    add_flags(parser)
    args = parser.parse_args()
    parser.complete_nodes(args)  # chooses -g, and with one node a free port
    # The data is fetched once on each node, before its processes start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    if args.device == "cpu":  # hide C++ back traces; Python raises the same errors
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        # Starts args.gpus processes. Each is a new Python, which imports this file, and so
        # finds the function train. Then each calls train(local_rank, args), with 0, 1 and so on.
        mp.spawn(train, (args,), args.gpus)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))  # the error of the first rank that failed
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for process in mp.active_children():
            process.kill()  # no rank outlives this process


if __name__ == "__main__":
    main()
