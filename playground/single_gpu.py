"""One process, one device: the plain training loop that every later lesson changes.

All of it is ordinary PyTorch. The later lessons keep these functions, with these names and in this order, so that
comparing two files shows what is new (a line marked NEW says why it is there):

    git diff --no-index playground/single_gpu.py playground/data_parallel.py

It runs on a GPU if there is one, else on the CPU:

    python playground/single_gpu.py
    python playground/single_gpu.py --model cnn --epochs 1 --savefile checkpoints/cnn.pt

It prints a line an epoch, over 59,904 training images (the last, incomplete batch is left out) and all 10,000 test
images (times will differ):

    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.52 s  115,200 images/s

Break it, in a copy beside it (cp playground/single_gpu.py playground/broken.py):
  1. Comment out `order.manual_seed(...)`: the batches come in an order that no other lesson knows; compare the losses.
  2. Comment out `optimizer.zero_grad()`: what does each step follow then? Compare the losses.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
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
        loss_sum += loss.detach().double() * len(labels)  # on the device: .item() would wait for it in each step
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
    # whole_batch: our data set hands out whole batches; pinned memory: a GPU reads it by itself, while Python goes on
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, 1000, **options)
    model = MODELS[args.model](args.width, args.layers).to(device)
    # eps: PyTorch's 1e-8 is right elsewhere; here it would make large steps of rounding errors, where gradients are
    # nearly 0, and blur the comparison of lessons. fused: one pass over all weights
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
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole


def main():
    """Read the flags, make sure that the data is there, and train."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
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
