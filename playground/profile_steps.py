r"""Where the time of a step goes: torch.profiler shows which messages hide behind computing.

This lesson is distributed_data_parallel_torchrun.py with a profiler. In every epoch the profiler
records when the operations and messages of ten steps begin and end. Each rank writes its record, a
trace, to a file. Open this file at https://ui.perfetto.dev, which does not upload it. A row is a
thread, time runs to the right, and the spans named gloo:all_reduce are messages.

While a message travels, a rank can compute. Then the message costs no time of its own, and we call
it hidden. If the rank has nothing to compute meanwhile, it waits. DDP hides a part of its messages,
because it sends a bucket of gradients as soon as backward() has filled it.

Run it:
    torchrun --standalone --nproc-per-node 2 \
        playground/profile_steps.py --batch_size 512 --width 1024 --epochs 1

It prints the same numbers as single_gpu.py, then the mean time of a step and its parts for each
rank. Here only rank 0 is shown (times will differ):
    epoch 1/1  loss 0.2961  train 90.87%  test 95.73%  5.64 s  10,620 images/s
    rank  step (ms)   = data      + computing + messages    messages hidden
    0     54.90       0.39        41.10       13.42         8.71

"data" is the time in which a rank only reads a batch, and "messages" the time in which it waits for
messages, or for a rank that is late. "computing" is the remainder, which includes Python's own
overhead. "messages hidden" is not a part of the step, because it passes while the rank computes.

Add one of these flags to the command, and almost nothing is hidden:
    --bucket_cap_mb 1000    a single bucket of DDP, which is full only when backward() ends
    --average bucket        one long message after backward(), as in manual_data_parallel.py
    --average each          a message for each gradient after backward()

With --average, each step has one more message, a short one that counts the gradients.
playground/pictures.md draws a step with several buckets and a step with one.

On a CPU, gloo's threads use the cores that compute. So even a hidden message slows the step down.

A GPU takes its work from queues, which are called streams. It does the work of one stream in order,
and it can do the work of several streams at the same time. DDP's messages have a stream of their
own, so they can be hidden. With --average, they are not hidden. There, all_reduce is called without
async_op=True, so the stream of the computations waits for the message. In the trace of a GPU,
messages are the spans named ncclDevKernel_*.

The profiler makes steps slower. So compare the parts of a step here, but not images/s.

Try breaking it, in a copy:
  1. Write `time.sleep(0.05 * dist.get_rank())` before `loss.backward()`. On which rank does
     "computing" grow, and on which rank "messages"?
  2. Comment out `profiler.step()`, and run it with a new --out. What does the schedule wait for?

The next lesson, manual_sharding.py, shards what DDP replicates.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import MODELS
from common.roll_call import meet
from measure.traces import step_times


def join(args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    node = os.environ.get("GROUP_RANK", "0")
    row = f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", *rows, sep="\n", flush=True)
    return rank, device


def gradients_on_any_rank(model):
    """Return the gradients of those parameters that have one on any rank.

    A parameter has no gradient (None) if it is frozen, or if forward() did not use it. If no rank
    has one, it stays None, because the optimizer skips such a parameter. If only some ranks have
    one, it becomes zero on the other ranks.
    """
    parameters = list(model.parameters())
    has_gradient = [parameter.grad is not None for parameter in parameters]
    # The ranks must make the same all_reduce calls in the same order. But no rank knows which
    # gradients exist on the others, so the ranks count them. This costs a short message in each
    # step, and a GPU must finish backward() before Python can read the counts. DDP sends such a
    # message only with find_unused_parameters=True.
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
    dist.all_reduce(message)  # now all ranks have the mean
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


def run_epoch(model, loader, device, optimizer=None, average_by="ddp", profiler=None):
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
            if average_by != "ddp":
                in_one_bucket = average_by == "bucket"
                average_gradients(model, in_one_bucket)
            optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
        if profiler:
            profiler.step()  # NEW: a step ends here; the next one begins with reading its batch
    dist.all_reduce(totals)
    return totals.tolist()


def show_steps(rank, path):
    """Print the mean time of each rank's traced steps, and its parts."""
    with open(path) as file:
        times = step_times(json.load(file))
    row = f"{rank:<6}"
    for milliseconds in times.values():
        row += f"{milliseconds:<12.2f}"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if rank == 0:
        head = "rank  step (ms)   = data      + computing + messages    messages hidden"
        print(head, *rows, sep="\n", flush=True)


@record
def train(args):
    """Train and test, and print one line for each epoch."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler logs when it starts
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.manual_seed(args.seed)
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
    plain_model = MODELS[args.model](args.width, args.layers).to(device)
    if args.average == "ddp":
        # NEW: with bucket_cap_mb=None DDP chooses the size of the buckets.
        model = DistributedDataParallel(plain_model, bucket_cap_mb=args.bucket_cap_mb)
    else:
        model = plain_model  # all ranks have made the same model, because their seeds are equal
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    os.makedirs(args.out, exist_ok=True)
    trace_path = f"{args.out}/rank{rank}.json"

    def write_trace(profiler):
        """Write what the profiler has recorded. It is called after ten steps."""
        profiler.export_chrome_trace(trace_path)

    # NEW: the profiler skips the first five steps, because they are slower. If an epoch has fewer
    # than ten steps, it skips half of them.
    warmup = min(5, len(train_loader) // 2)
    schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=10, repeat=1)

    for epoch in range(args.epochs):
        # The order differs from epoch to epoch, and it is the same on all ranks and in each run.
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        hidden = None if rank == 0 else True  # None: the bar is hidden if there is no terminal
        progress = tqdm(train_loader, leave=False, disable=hidden)
        # NEW: the profiler counts the calls to its step(), and follows the schedule.
        with torch.profiler.profile(schedule=schedule, on_trace_ready=write_trace) as profiler:
            loss_sum, hits, seen = run_epoch(
                model, progress, device, optimizer, args.average, profiler
            )
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(plain_model, test_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum / seen:.4f}"
                f"  train {hits / seen:.2%}  test {test_hits / test_seen:.2%}"
                f"  {seconds:.2f} s  {seen / seconds:,.0f} images/s",
                flush=True,
            )
        if rank == 0 and args.savefile:
            state = {"model": plain_model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch + 1, "args": vars(args)}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state, file)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(f"{args.savefile}.tmp", args.savefile)
    show_steps(rank, trace_path)  # NEW: those of the last epoch
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


@explained  # guard rail: explains errors
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--average", choices=["ddp", "each", "bucket"], default="ddp", help="ddp, or by hand")
    add("--bucket_cap_mb", type=int, help="MiB in a bucket of DDP; default: first 1, then 25")
    add("--out", metavar="DIR", default="traces", help="folder for rank0.json, rank1.json, ...")
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
    add("-s", "--savefile", help="write a checkpoint to this file after each epoch")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(
            f"--batch_size {args.batch_size} cannot be divided by {world_size} processes:"
            f" use --batch_size {nearest}"
        )
    # The ranks of a node fetch the data one at a time, so it is downloaded once.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
