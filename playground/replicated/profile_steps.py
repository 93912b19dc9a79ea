r"""Where the time of a step goes: `torch.profiler` shows which messages hide behind computing.

Run it:
    torchrun --standalone --nproc-per-node 2 \
        playground/replicated/profile_steps.py --batch_size 512 --width 1024 --epochs 1

It prints the same numbers as `single_gpu.py` with these flags, up to rounding, then the mean time
of ten steps and of their parts for each rank. Here only rank 0 is shown (times differ):
    epoch 1/1  loss 0.2960  train 90.87%  test 95.68%  7.95 s  7,533 images/s
    rank  step (ms)   = data      + computing + messages    messages hidden
    0     69.22       0.30        59.94       8.97          8.77

In "data", a rank only reads a batch. In "messages", it only waits, for a message or for a late rank
(`playground/pages/stragglers.md` finds the late one). "computing" is the rest of the step, with
Python's own overhead. "messages hidden" is how long messages travelled while the rank computed, so
it is no part of the sum. The profiler makes steps slower, so compare the parts of a step, and not
the throughput (images/s).

DDP hides a part of its messages, because it sends a bucket as soon as all of its gradients are
complete (`playground/pages/figures/overlap.svg`). On CPUs, messages slow the computing a little,
because both use the same cores. Add `--bucket_cap_mb 1000`, and almost nothing is hidden, because a
single bucket is complete only when backward() ends.

Each rank writes what the profiler has recorded, a trace, to `traces/rank0.json`,
`traces/rank1.json`, and so on. Open such a file at https://ui.perfetto.dev, which does not upload
it. A row is a thread, time runs to the right, and `gloo:` names a message.

Try breaking it, in a copy beside it:
  1. Write `time.sleep(0.05 * dist.get_rank())` before `loss.backward()`. On which rank does
     "computing" grow, and on which rank "messages"?
  2. Replace `profiler.step()` with `pass`. Which steps does the trace have, and why?
Builds on: distributed_data_parallel_torchrun.py
The next lesson, `finding_hangs.py`, finds the rank for which the others wait.
"""

import json
import os
import re
import statistics
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


def train(args):
    """Train as before, record some steps of the first epoch, and show where their time went."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler logs when it starts
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    # NEW: with bucket_cap_mb=None, DDP chooses the size of the buckets.
    model = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    # NEW: the first five steps are warmup and are not kept, because they are slower. Then ten are
    # recorded; a shorter epoch records fewer.
    warmup = min(5, len(train_loader) // 2)
    active = min(10, len(train_loader) - warmup)
    schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1)
    # acc_events=True only avoids a false warning of older versions of PyTorch.
    with torch.profiler.profile(schedule=schedule, acc_events=True) as profiler:
        for epoch in range(args.epochs):
            fit_epoch(epoch, model, optimizer, profiler, train_loader, test_loader, device, args)
    show_steps(profiler, f"{args.out}/rank{rank}.json")
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


def run_epoch(model, loader, device, optimizer=None, profiler=None):
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
            optimizer.step()
            profiler.step()  # NEW: a step ends here. The profiler counts them for its schedule
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    size = "MiB in a bucket of DDP; default: first 1, then 25"
    add("--bucket_cap_mb", type=flags.positive, help=size)
    folder = "folder for rank0.json, rank1.json, ..."
    add("--out", type=flags.new_folder, metavar="DIR", default="traces", help=folder)


# You can stop here: what follows only reads the trace and prints.


def show_steps(profiler, path):
    """Write the trace of this rank, and print the times of all ranks."""
    profiler.export_chrome_trace(path)
    with open(path) as file:
        times = step_times(json.load(file))
    row = f"{dist.get_rank():<6}"
    for milliseconds in times.values():
        row += f"{milliseconds:<12.2f}"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        head = "rank  step (ms)   = data      + computing + messages    messages hidden"
        print(head, *rows, sep="\n", flush=True)


def step_times(trace):
    """Return the mean time of the steps in a trace, and of the parts of a step, in ms.

    An event has a kind (cat) and a name. The kind is "kernel" for work on a GPU, "cpu_op" for an
    operation of PyTorch on a CPU, and "user_annotation" for a span that some code has named.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]  # with a duration
    on_gpu = any(event.get("cat") == "kernel" for event in events)
    kind = "gpu_user_annotation" if on_gpu else "user_annotation"
    steps = [e for e in events if e.get("cat") == kind and e["name"].startswith("ProfilerStep")]
    if on_gpu:
        # A GPU computes later than Python asks it to, and may be idle between two steps. So a step
        # lasts from its first kernel to the first one of the next step.
        steps.sort(key=lambda step: step["ts"])
        for step, following in pairwise(steps):
            step["dur"] = following["ts"] - step["ts"]
        steps = steps[:-1] or steps
    rows = []
    for step in steps:
        data = covered(events, step, r"user_annotation enumerate\(DataLoader\)")
        if on_gpu:
            messages = covered(events, step, "kernel nccl")
            computing = covered(events, step, "kernel (?!nccl)")
        else:
            messages = covered(events, step, "user_annotation gloo:")
            # backward() is in the trace even while a rank only waits in it. The operations named
            # aten::... run only while the rank computes. (Those of the loader are in `data`.)
            computing = covered(events, step, r"cpu_op aten::|user_annotation Optimizer\.") & ~data
        # A rank waits while a message travels and it does not compute.
        waiting = messages & ~computing
        hidden = messages & computing
        only_data = data & ~messages & ~computing
        microseconds = [runs.sum().item() for runs in (only_data, waiting, hidden)]
        rows.append([step["dur"], *microseconds])
    means = [statistics.mean(column) / 1000 for column in zip(*rows, strict=True)]
    whole, data, waited, hidden = means
    compute = whole - data - waited
    return {"step": whole, "data": data, "compute": compute, "waiting": waited, "hidden": hidden}


def covered(events, step, pattern):
    """Mark each microsecond of a step in which an event of a matching kind and name runs."""
    runs = torch.zeros(round(step["dur"]), dtype=torch.bool)
    for event in events:
        first = max(0, round(event["ts"] - step["ts"]))  # when it starts, in microseconds
        last = round(event["ts"] + event["dur"] - step["ts"])
        if first < last and re.match(pattern, f"{event.get('cat')} {event['name']}"):
            runs[first:last] = True
    return runs


def fit_epoch(epoch, model, optimizer, profiler, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    rank = dist.get_rank()
    train_loader.sampler.set_epoch(epoch)  # without this, all epochs have the same order
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, images = run_epoch(model, bar, device, optimizer, profiler)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    if rank == 0:
        digits = 12 if args.double else 4
        peak = ""  # of the memory that this rank's tensors have taken on its GPU
        if args.device != "cpu":
            peak = f"  {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB"
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s{peak}",
            flush=True,
        )


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), check_flags() and main(). If you copy this lesson, copy this, too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device, gpu = torch.device(args.device), None  # gpu stays None on a CPU
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()  # torchrun has set it, the world size and the address of rank 0
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks."""
    parser.check_batch(args.batch_size, world_size)


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.ranks(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)  # an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # only one rank downloads
    train(args)


if __name__ == "__main__":
    main()
