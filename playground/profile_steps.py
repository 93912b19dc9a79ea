"""Where a step's time goes: torch.profiler in a training loop, what is hidden and what is waited for.

distributed_data_parallel_torchrun.py with a profiler around each epoch. It notes when the operations and messages of
ten steps begin and end; each rank writes what it saw to a file, its trace. https://ui.perfetto.dev shows it (it stays
in your browser): a row is a thread, time runs to the right, the spans gloo:all_reduce are messages. One that travels
while other rows compute is hidden: it costs no time of its own. If nothing computes meanwhile, the rank waits for it.
DDP hides some: it sends a bucket of gradients as soon as backward() has filled it.

    torchrun --standalone --nproc-per-node 2 playground/profile_steps.py --batch_size 512 --width 1024 --epochs 1

It prints single_gpu.py's numbers, how long an average traced step took, and for what (times will differ):

    epoch 1/1  loss 0.2961  train 90.87%  test 95.73%  5.64 s  10,620 images/s
    rank  step (ms)   = data      + computing + messages    messages hidden
    0     54.90       0.39        41.10       13.42         8.71

Add one of these, and (nearly) nothing is hidden any more:

    --bucket_cap_mb 1000    one bucket of DDP's for all gradients, full only at the end of backward()
    --average bucket        one message by hand after backward(), as in manual_data_parallel.py --bucket
    --average each          the same with a message for each gradient

"Computing" is what the other two leave over, so Python's own work, too; messages include waiting for a rank that is
late. On CPUs gloo's threads share the cores with the computing, so even a hidden message slows it. On GPUs messages are
kernels named ncclDevKernel_*: DDP's have a stream of their own; those by hand, without async_op=True, run on the stream
that computes and can't hide. Profiling slows the steps: compare their parts, and take images/s from another lesson.

Break it, in a copy: (1) before `loss.backward()` write `time.sleep(0.05 * dist.get_rank())`. Whose computing grows, and
whose waiting? (2) Comment out `profiler.step()` and give it a new --out. What does the schedule wait for?
"""

import argparse
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
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS
from measure.traces import step_times


def join(args):
    """Join the process group and print who is who. Returns this process's rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    gpu = torch.device("cuda", local_rank) if args.device == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)  # else every rank would also use GPU 0
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank, device, node = dist.get_rank(), gpu or torch.device("cpu"), os.environ.get("GROUP_RANK", "0")
    me = f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{os.uname().nodename}"
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, me)
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", *everyone, sep="\n", flush=True)
    return rank, device


def average_gradients(model, average):
    """Replace each gradient by its mean over the ranks, as manual_data_parallel.py does."""
    gradients = [weight.grad for weight in model.parameters()]
    messages = [parameters_to_vector(gradients)] if average == "bucket" else gradients
    for message in messages:
        dist.all_reduce(message)
        message /= dist.get_world_size()
    if average == "bucket":
        vector_to_parameters(messages[0], gradients)


def run_epoch(model, loader, device, args, optimizer=None, profiler=None):
    """Train, or test without an optimizer. Returns sums over the images of all ranks: loss, hits, images."""
    model.train(optimizer is not None)
    loss_sum = hits = seen = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            if args.average != "ddp":
                average_gradients(model, args.average)
            optimizer.step()
        loss_sum += loss.detach().double() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
        if profiler:
            profiler.step()  # NEW: here a step ends; the next one begins with reading its batch
    totals = torch.tensor([loss_sum, hits, seen], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()


def show_steps(rank, path):
    """Print the mean of each rank's traced steps and its parts."""
    with open(path) as file:
        mine = f"{rank:<6}" + "".join(f"{ms:<12.2f}" for ms in step_times(json.load(file)).values())
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        head = "rank  step (ms)   = data      + computing + messages    messages hidden"
        print(head, *everyone, sep="\n", flush=True)


@record
def train(args):
    """Train, test and report, one line an epoch."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler's C++ side logs its own starts and stops
    rank, device = join(args)
    meet(args)  # guard rail
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    share = args.batch_size // world_size
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    mine = range(rank, len(test_set), world_size)  # no padding: each test image counts exactly once
    test_loader = DataLoader(test_set, 1000, sampler=mine, **options)
    model = MODELS[args.model](args.width, args.layers).to(device)
    plain = model  # the same on all ranks already, as the seed is
    if args.average == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=args.bucket_cap_mb)  # NEW: None is DDP's own choice
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    os.makedirs(args.out, exist_ok=True)
    trace = f"{args.out}/rank{rank}.json"

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        with torch.profiler.profile(  # NEW: in each epoch it warms up, traces ten steps and writes them
            schedule=torch.profiler.schedule(wait=0, warmup=min(5, len(train_loader) // 2), active=10, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(trace),
        ) as profiler:
            loss, hits, seen = run_epoch(model, bar, device, args, optimizer, profiler)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(plain, test_loader, device, args)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        if rank == 0 and args.savefile:
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole
    show_steps(rank, trace)  # NEW: of the last epoch
    dist.destroy_process_group()


def main():
    """Read the flags and be one of the ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--average", choices=["ddp", "each", "bucket"], default="ddp", help="who averages the gradients, and how")
    add("--bucket_cap_mb", type=int, help="MiB in a bucket of DDP's; default: 1 in the first, 25 in the others")
    add("--out", metavar="DIR", default="traces", help="folder for rank0.json, rank1.json, ...; default: traces/")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--model", choices=MODELS, default="mlp")
    add("--width", type=int, help="neurons in each hidden layer; default: 64 (mlp), 120 (cnn)")
    add("--layers", type=int, help="hidden layers, the linear ones in cnn; default: 3 (mlp), 1 (cnn)")
    add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits where it can't be had")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="float64: no rounding to be seen between the lessons")
    add("-s", "--savefile", help="write a checkpoint here after each epoch")
    args = parser.parse_args()
    check(parser, args)  # guard rail
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(f"--batch_size {args.batch_size} can't be shared by {world_size} processes: use {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # one rank of a node at a time
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
