r"""Where the time of a step goes: torch.profiler shows which messages hide behind computing.

This lesson is distributed_data_parallel_torchrun.py with a profiler. In every epoch the profiler
records when the operations and messages of ten steps begin and end. Each rank writes its record, a
trace, to a file. Open this file at https://ui.perfetto.dev, which does not upload it. A row is a
thread, and time runs to the right. On CPUs, messages are the spans named gloo:all_reduce. On GPUs,
they are kernels whose names begin with nccl.

A message that travels while the rank computes causes no waiting. We call it hidden. (On CPUs it
slows the computing a little, because both use the same cores.) If the rank has nothing to compute
meanwhile, it waits. DDP hides a part of its messages, because it sends a bucket as soon as all of
its gradients are complete.

Run it:
    torchrun --standalone --nproc-per-node 2 \
        playground/profile_steps.py --batch_size 512 --width 1024 --epochs 1

It prints the numbers that single_gpu.py prints with these flags, then the mean time of a step and
its parts for each rank. Here only rank 0 is shown (times will differ):
    epoch 1/1  loss 0.2961  train 90.87%  test 95.73%  5.64 s  10,620 images/s
    rank  step (ms)   = data      + computing + messages    messages hidden
    0     54.90       0.39        41.10       13.42         8.71

In "data", a rank only reads a batch. In "messages", it only waits, for a message or for a late
rank. "computing" is the rest of the step, with most of Python's own overhead. "messages hidden"
is how long messages travelled while the rank computed, so it is no part of the sum. The profiler
makes steps slower, so compare the parts of a step, and not images/s.

Add one of these flags to the command, and almost nothing is hidden:
    --bucket_cap_mb 1000    a single bucket of DDP, which is complete only when backward() ends
    --average bucket        one long message after backward(), as in manual_data_parallel.py
    --average each          a message for each gradient after backward()

playground/pictures.md draws a step with several buckets and a step with one.

Try breaking it, in a copy:
  1. Write `time.sleep(0.05 * dist.get_rank())` before `loss.backward()`. On which rank does
     "computing" grow, and on which rank "messages"?
  2. Comment out `profiler.step()`, and run it with a new --out. What does the schedule wait for?

The next lesson, sharded_optimizer.py, shards what DDP replicates on every rank.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.traces import mean_ms, minus, named, whole_steps


def step_times(trace):
    """Return where the time of a rank went: the mean of the traced steps and of their parts, in ms.

    Times are lists of pairs, (begin, end). named() returns the times of all operations whose
    category and name match a pattern. A category is "kernel" for work on a GPU, "cpu_op" for an
    operation of PyTorch on a CPU, "user_annotation" for a span with a name. minus() removes from
    the times of its first list all that the second list covers. mean_ms() returns the mean over the
    steps.
    """
    steps = whole_steps(trace)
    loading = named(trace, r"user_annotation enumerate\(DataLoader\)")
    messages = named(trace, "kernel nccl")
    computing = named(trace, "kernel (?!nccl)")
    if not computing:  # there is no GPU
        messages = named(trace, "user_annotation gloo:")
        # backward() is in the trace even while a rank only waits in it. So count the operations
        # named aten::..., which run only while the rank computes.
        computing = named(trace, r"cpu_op aten::|user_annotation Optimizer\.")
        computing = minus(computing, loading)  # the loader calls operations, too
    # NEW: a rank waits in the part of a message during which it does not compute.
    waiting = minus(messages, computing)
    only_loading = minus(loading, computing + messages)
    step = mean_ms(steps, steps)
    data = mean_ms(only_loading, steps)
    waited = mean_ms(waiting, steps)
    hidden = mean_ms(messages, steps) - waited
    compute = step - data - waited
    return {"step": step, "data": data, "compute": compute, "waiting": waited, "hidden": hidden}


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


def average_gradients(model):
    """Replace each gradient with its mean over the ranks, as in manual_data_parallel.py.

    On a GPU, these messages run in the queue (the stream) that also computes, so nothing is
    computed meanwhile. Messages with async_op=True, such as DDP's, have a stream of their own.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def average_in_one_bucket(model):
    """Do the same with one long message, which takes less time than many short ones."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, bucket.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


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
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, rank_row(node, rank, local_rank, device))
    if rank == 0:
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None, average=None, profiler=None):
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
            loss.backward()
            if average is not None:  # DDP has averaged the gradients in backward()
                average(model)
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
        if profiler is not None:
            profiler.step()  # NEW: a step ends here; the next one begins with reading its batch
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler logs when it starts
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    plain_model = make_model(args).to(device)
    if args.average == "ddp":
        # NEW: with bucket_cap_mb=None DDP chooses the size of the buckets.
        model = DistributedDataParallel(plain_model, bucket_cap_mb=args.bucket_cap_mb)
        average = None
    else:
        model = plain_model  # all ranks have made the same model, because their seeds are equal
        average = average_in_one_bucket if args.average == "bucket" else average_gradients
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    os.makedirs(args.out, exist_ok=True)
    trace_path = f"{args.out}/rank{rank}.json"

    def write_trace(profiler):
        """Write what the profiler has recorded. It is called after ten steps, or at the end."""
        profiler.export_chrome_trace(trace_path)

    # NEW: the first five steps are warmup and are not kept, because they are slower. At most ten
    # more are kept. If an epoch has fewer than ten steps, half of them are warmup.
    warmup = min(5, len(train_loader) // 2)
    schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=10, repeat=1)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        # NEW: the profiler counts the calls to its step(), and follows the schedule.
        with torch.profiler.profile(schedule=schedule, on_trace_ready=write_trace) as profiler:
            trained = run_epoch(model, progress, device, optimizer, average, profiler)
        seconds = time.perf_counter() - start
        tested = run_epoch(plain_model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    show_steps(rank, trace_path)  # NEW: of the last epoch, because each epoch overwrites the trace
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--average", choices=["ddp", "each", "bucket"], default="ddp", help="ddp, or by hand")
    add("--bucket_cap_mb", type=int, help="MiB in a bucket of DDP; default: first 1, then 25")
    add("--out", metavar="DIR", default="traces", help="folder for rank0.json, rank1.json, ...")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
