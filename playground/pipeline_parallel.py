"""Pipeline parallelism: a process for each part of the model, and a batch that flows through them in pieces.

The model is cut into stages. Activations travel from rank to rank, their gradients travel back. A schedule says when a
rank works on which piece of the batch (micro-batch), and torch.distributed.pipelining has many of them:

    GPipe                    all forward passes, then all backward passes (https://arxiv.org/abs/1811.06965)
    1F1B                     backward as early as possible: a rank keeps the activations of p micro-batches, not of all
    Interleaved1F1B          two stages on each rank: shorter waits, more messages (https://arxiv.org/abs/2104.04473)
    InterleavedZeroBubble    also computes gradients of weights where it would wait (https://arxiv.org/abs/2401.10241)

With p ranks and m micro-batches the first two leave a rank waiting for (p-1)/(m+p-1) of the time, the bubble. Wide
layers come close to that; with narrow ones messages take most of the time. The lesson measures it after training:

    torchrun --standalone --nproc-per-node 2 playground/pipeline_parallel.py --width 512 --layers 8 --batch_size 2048
    torchrun --standalone --nproc-per-node 2 playground/pipeline_parallel.py --schedule 1F1B --plot timeline.png
    NODE0=<ip of node 0> run/torchrun_node.sh playground/pipeline_parallel.py    # on each of two nodes

It prints single_gpu.py's numbers and who computes when (digit: forward, letter: backward, dot: waiting). An ideal one:
    rank 0 |000111222333444555666777......aaabbbcccdddeeefffggghhh|
    rank 1 |...000111222333444555666777aaabbbcccdddeeefffggghhh...|

Break it, in a copy beside it: (1) leave `, target=F.pad(labels, missing)` out. Which rank complains, why only that one?
(2) Try --micro_batches 2, 4, 16, 64: the formula's bubble shrinks. Does the measured one follow, and the step's time?
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS
from measure.timeline import show, watch


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


def cut(model, count):
    """Cut a model into stages that share its weights, each with about equally many layers."""
    modules = [*model.stage1, *model.stage2]
    layers = [i for i, module in enumerate(modules) if list(module.parameters())]  # not ReLU and the like
    starts = [layers[stage * len(layers) // count] for stage in range(count)]
    starts = [i - isinstance(modules[i - 1], torch.nn.Flatten) for i in starts]  # a stage can't pass on a view
    return [torch.nn.Sequential(*modules[start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]


def pipeline(model, device, name, micro_batches):
    """Move this rank's stages to its device. Returns the schedule that runs them, and the stages."""
    world_size, interleaved = dist.get_world_size(), name.startswith("Interleaved")
    parts = cut(model, world_size * (1 + interleaved))
    mine = range(dist.get_rank(), len(parts), world_size)  # NEW: in turn, so rank 0 has stages 0 and p, if it has two
    stages = [PipelineStage(parts[i].to(device), i, len(parts), device) for i in mine]
    schedule = schedules.get_schedule_class(name)
    return schedule(stages if interleaved else stages[0], micro_batches, F.cross_entropy), stages


def run_epoch(model, schedule, loader, device, batch_size, optimizer=None):
    """Train, or test without an optimizer. Returns sums over all images: loss, hits, images."""
    model.train(optimizer is not None)
    loss_sum = hits = seen = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        missing = [0, batch_size - len(labels)]  # NEW: stages are made for one size of batch, so fill it up
        inputs = [F.pad(images, [0] * 6 + missing)] if dist.get_rank() == 0 else []  # NEW: others get activations
        run = schedule.step if optimizer else schedule.eval  # NEW: m times forward and backward, or only forward
        if optimizer:
            optimizer.zero_grad()
        with torch.set_grad_enabled(optimizer is not None):
            logits = run(*inputs, target=F.pad(labels, missing))
        if optimizer:
            optimizer.step()
        if logits is not None:  # NEW: only the last rank has them
            loss_sum += F.cross_entropy(logits.detach()[: len(labels)], labels).double() * len(labels)
            hits += (logits.argmax(dim=1)[: len(labels)] == labels).sum()
            seen += len(labels)
    totals = torch.tensor([loss_sum, hits, seen], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()


def save(args, epoch, model, optimizer):
    """Collect all stages on rank 0, and write a checkpoint like those of the other lessons."""
    moments = {i: {k: v.cpu() for k, v in each.items()} for i, each in optimizer.state_dict()["state"].items()}
    weights = {name: w.detach().cpu() for i, (name, w) in enumerate(model.named_parameters()) if i in moments}
    dist.gather_object((weights, moments), ranks := [None] * dist.get_world_size() if dist.get_rank() == 0 else None)
    if ranks:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        for weights, moments in ranks:  # NEW: each rank has changed its own stages only
            state["model"] |= weights
            state["optimizer"]["state"] |= moments
        with open(f"{args.savefile}.tmp", "wb") as file:
            torch.save(state | {"epoch": epoch, "args": vars(args)}, file)
        os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole


@record
def train(args):
    """Train, test and report, one line an epoch; then show who computes when."""
    rank, device = join(args)
    meet(args)  # guard rail
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)  # NEW: all ranks read the same batches
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, args.batch_size, **options)
    model = MODELS[args.model](args.width, args.layers)  # NEW: all of it, on the CPU; only this rank's stages move
    schedule, _ = pipeline(model, device, args.schedule, args.micro_batches)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)  # NEW: skips others' weights

    for epoch in range(args.epochs):
        order.manual_seed(args.seed + epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, schedule, bar, device, args.batch_size, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, schedule, test_loader, device, args.batch_size)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        if args.savefile:
            save(args, epoch + 1, model, optimizer)
    plans = (args.schedule, args.micro_batches), ("GPipe", 1)  # the second one: a batch in one piece
    steps = {plan: watch(*pipeline(model, device, *plan), *next(iter(train_loader))) for plan in plans}
    if rank == 0:
        show(steps, [f"rank {i}" for i in range(dist.get_world_size())], args.plot)
    dist.destroy_process_group()


def main():
    """Read the flags and be one of the ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--schedule", choices=["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"], default="GPipe")
    add("--micro_batches", type=int, default=8, help="pieces of a batch")
    add("--plot", metavar="PNG", help="draw the timeline into this file")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step")
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
    world_size, pieces = int(os.environ["WORLD_SIZE"]), args.micro_batches
    args.schedule = args.schedule if world_size > 1 else "GPipe"  # one rank has nobody to take turns with
    interleaved = args.schedule.startswith("Interleaved")
    stages, (hidden, others) = world_size * (1 + interleaved), {"mlp": (3, 1), "cnn": (1, 3)}[args.model]  # layers
    if (args.layers or hidden) + others < stages:
        parser.error(f"{stages} stages need as many layers: use --layers {stages - others}")
    if (interleaved and pieces % world_size) or (args.schedule == "1F1B" and pieces < world_size):
        fitting = max(1, round(pieces / world_size)) * world_size
        parser.error(f"{args.schedule} can't take {pieces} micro-batches: use --micro_batches {fitting}")
    if args.batch_size % pieces:
        nearest = max(1, round(args.batch_size / pieces)) * pieces
        parser.error(f"--batch_size {args.batch_size} can't be cut into {pieces} micro-batches: use {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # one rank of a node at a time
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
