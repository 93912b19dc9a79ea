"""DataParallel: one process that shares every batch among the GPUs of one machine.

nn.DataParallel is one line around the model. In each step it copies the model from the first GPU to all others, cuts
the batch into as many pieces, runs the pieces in threads, gathers the outputs on the first GPU and adds up the
gradients there. The threads share one Python interpreter, the first GPU has more to do than the others, and the copies
are made anew in each step. That is why it is history: DistributedDataParallel, with a process for each GPU, has
replaced it, but older code is full of it. Without a GPU it does nothing: the model runs as in single_gpu.py.

    python playground/data_parallel.py         # all GPUs of this machine
    python playground/data_parallel.py -g 2    # the first two

Its lines are those of single_gpu.py, for any number of GPUs (times will differ):

    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.52 s  115,200 images/s

Break it, in a copy (the first takes a GPU, the second two):
  1. Save `model` in place of `plain`. What are the keys of the checkpoint, and will single_gpu.py's model take it?
  2. Leave the model on the CPU. Which device does DataParallel want it on, and why that one?
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import MODELS


def run_epoch(model, loader, device, optimizer=None):
    """Train, or test without an optimizer. Returns sums over all images: loss, hits (right guesses), images."""
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
            optimizer.step()
        loss_sum += loss.detach().double() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    return loss_sum.item(), hits.item(), seen


def train(args):
    """Train, test and report, one line an epoch."""
    device = torch.device(args.device)
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, 1000, **options)
    model = MODELS[args.model](args.width, args.layers).to(device)
    if args.device == "cuda":  # NEW: from now on model(images) uses all GPUs; the training loop does not change
        model = nn.DataParallel(model, device_ids=list(range(args.gpus)))
    else:
        print("without a GPU nn.DataParallel does nothing: this is single_gpu.py", file=sys.stderr)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        order.manual_seed(args.seed + epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, device)
        line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
        line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
        print(line, flush=True)
        if args.savefile:
            plain = model.module if args.device == "cuda" else model  # NEW: the keys of the plain model
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole


def main():
    """Read the flags, make sure that the data is there, and train."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("-g", "--gpus", type=int, default=max(1, torch.cuda.device_count()), help="default: all")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
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
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
