"""Model parallelism: one model on two devices, with and without pipelining.

A model that is too large for one GPU can be cut in two. Its first half, stage1, lives on one GPU and stage2 on another.
What stage1 puts out (the activations) travels to the second GPU, and its gradient travels back. That gives room, not
speed, because one GPU always waits for the other. With --pipelined the batch goes through in pieces (micro-batches):
the first GPU works on the next piece while the second one works on the piece before. With p stages and m micro-batches
each GPU still waits for (p-1)/(m+p-1) of the time, the bubble (GPipe, https://arxiv.org/abs/1811.06965).

    python playground/model_parallel.py    # on two GPUs; with fewer, both stages on one device
    python playground/model_parallel.py --pipelined --micro_batches 8 --plot timeline.png
    python playground/model_parallel.py --devices cuda:0 cpu

It prints single_gpu.py's numbers, and at the end a timeline of one step (times will differ):

    stage1 on cpu, stage2 on cpu
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.55 s  109,000 images/s

With both stages on one device nothing overlaps, and pipelining only adds work: the timeline shows it.

Break it, in a copy beside it:
  1. Leave out `.to(devices[1])` after stage1. What does PyTorch say with two GPUs, and why nothing on the CPU alone?
  2. In run_epoch, add up the mean losses of the micro-batches (split logits and labels with tensor_split, as forward
     does): how many times too large are the gradients, and why does Adam hardly mind?
"""

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import MODELS
from measure.timeline import show, watch_modules


def forward(model, images, devices, micro_batches):
    """Run both stages, each on its own device. Returns the logits, (N, 10), on the second one."""
    logits = []
    for piece in images.to(devices[0], non_blocking=True).tensor_split(micro_batches):  # NEW: one if not pipelined
        activations = model.stage1(piece).to(devices[1])  # NEW: GPUs only queue this work, so Python goes on
        logits.append(model.stage2(activations))  # NEW: for the second GPU, while the first does the next piece
    return torch.cat(logits)  # one loss for the whole batch, so its gradients are those of the batch in one piece


def run_epoch(model, loader, devices, micro_batches, optimizer=None):
    """Train, or test without an optimizer. Returns sums over all images: loss, hits (right guesses), images."""
    model.train(optimizer is not None)
    loss_sum = hits = seen = 0
    for images, labels in loader:
        labels = labels.to(devices[1], non_blocking=True)  # NEW: the loss is computed where stage2 is
        with torch.set_grad_enabled(optimizer is not None):
            logits = forward(model, images, devices, micro_batches)
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()  # NEW: finds the way back through both devices by itself
            optimizer.step()
        loss_sum += loss.detach().double() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    return loss_sum.item(), hits.item(), seen


def observe(model, batch, devices, micro_batches, plot):
    """Show when each stage computes, with micro-batches and with the batch in one piece."""
    images, labels, steps = batch[0], batch[1].to(devices[1]), {}

    def step(pieces):
        F.cross_entropy(forward(model, images, devices, pieces), labels).backward()

    for pieces in sorted({micro_batches, 1}, reverse=True):
        steps["one process", pieces] = watch_modules(partial(step, pieces), [model.stage1, model.stage2], devices)
    show(steps, ["stage1", "stage2"], plot)
    if devices[0] == devices[1]:
        print(f"Both stages are on {devices[0]}, in one process: nothing can overlap. With a process for each it does:")
        print("torchrun --standalone --nproc-per-node 2 playground/pipeline_parallel.py", flush=True)


def train(args):
    """Train, test and report, one line an epoch; then show who computes when."""
    devices, micro_batches = [torch.device(name) for name in args.devices], args.micro_batches if args.pipelined else 1
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    pinned = any(device.type == "cuda" for device in devices)  # a GPU reads pinned memory by itself
    options = {"collate_fn": whole_batch, "pin_memory": pinned}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, 1000, **options)
    model = MODELS[args.model](args.width, args.layers)
    model.stage1.to(devices[0])  # NEW: each stage moves to its own device
    model.stage2.to(devices[1])
    print(f"stage1 on {devices[0]}, stage2 on {devices[1]}", flush=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        order.manual_seed(args.seed + epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, devices, micro_batches, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, devices, micro_batches)
        line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
        line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
        print(line, flush=True)
        if args.savefile:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole
    observe(model, next(iter(train_loader)), devices, micro_batches, args.plot)


def main():
    """Read the flags, make sure that the data is there, and train."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ["cpu", *(f"cuda:{number}" for number in range(gpus))]
    add("--device", choices=["cpu", "cuda"], default="cuda" if gpus else "cpu")
    add("--devices", nargs=2, choices=names, help="of stage1 and stage2; default: the first two GPUs, or one twice")
    add("--pipelined", action="store_true", help="cut each batch into micro-batches")
    add("--micro_batches", type=int, default=4, help="how many, with --pipelined")
    add("--plot", metavar="PNG", help="draw the timeline into this file")
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
    if args.devices is None:
        args.devices = ["cuda:0", "cuda:1"] if args.device == "cuda" and gpus > 1 else [args.device] * 2
    check(parser, args)  # guard rail
    if args.pipelined and args.micro_batches > args.batch_size:
        most = args.batch_size
        parser.error(f"--micro_batches {args.micro_batches}: {most} images make {most} pieces at most: use {most}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
