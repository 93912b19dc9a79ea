"""DataParallel: one process that uses several GPUs of one machine.

nn.DataParallel takes one line, which wraps the model. In each step it copies the model from the
first GPU to all others, and gives each GPU its part of the batch. One thread for each GPU computes
the outputs, which are gathered on the first GPU. backward() adds up the gradients there.

nn.DataParallel is obsolete, but older code often uses it. It is slow for three reasons. The threads
share one Python interpreter. The first GPU does more than the others. The model is copied in every
step. DistributedDataParallel has replaced it, with a process for each GPU.

Without a GPU, nn.DataParallel does nothing: the model runs as in single_gpu.py.

Run it:
    python playground/data_parallel.py         # all GPUs of this machine
    python playground/data_parallel.py -g 2    # the first two

It prints the same numbers as single_gpu.py, for any number of GPUs (times will differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.52 s  115,200 images/s

Try breaking it, in a copy (cp playground/data_parallel.py playground/broken.py):
  1. Save `model` instead of `plain_model`; this needs a GPU. What are the keys of the checkpoint?
     Does the model of single_gpu.py accept them?
  2. Leave the model on the CPU; this needs two GPUs. On which device does DataParallel expect it?

The next lesson, manual_data_parallel.py, trains with one process for each GPU.
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
    """Train, or only test if there is no optimizer.

    Returns three sums over all images: the losses, the images that were recognized, the images.
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
            optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    return totals.tolist()


def train(args):
    """Train and test, and print one line for each epoch."""
    device = torch.device(args.device)
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    generator = torch.Generator()
    sampler = RandomSampler(train_set, generator=generator)
    pin_memory = device.type == "cuda"  # a GPU copies from pinned memory while Python continues
    train_loader = DataLoader(
        train_set,
        args.batch_size,
        sampler=sampler,
        drop_last=True,
        collate_fn=whole_batch,  # common/data.py's data sets return whole batches already
        pin_memory=pin_memory,
    )
    test_loader = DataLoader(test_set, 1000, collate_fn=whole_batch, pin_memory=pin_memory)
    model = MODELS[args.model](args.width, args.layers).to(device)
    if args.device == "cuda":
        # NEW: from here on, model(images) uses all GPUs. The training loop does not change.
        model = nn.DataParallel(model, device_ids=list(range(args.gpus)))
    else:
        print("nn.DataParallel does nothing without a GPU: this is single_gpu.py", file=sys.stderr)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        # The order differs from epoch to epoch, and it is the same in each run.
        generator.manual_seed(args.seed + epoch)
        start = time.perf_counter()
        progress = tqdm(train_loader, leave=False, disable=None)  # None: shown only on a terminal
        loss_sum, hits, seen = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, device)
        print(
            f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum / seen:.4f}"
            f"  train {hits / seen:.2%}  test {test_hits / test_seen:.2%}"
            f"  {seconds:.2f} s  {seen / seconds:,.0f} images/s",
            flush=True,
        )
        if args.savefile:
            # NEW: save the plain model. The keys of DataParallel's own state begin with "module.".
            plain_model = model.module if args.device == "cuda" else model
            state = {"model": plain_model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch + 1, "args": vars(args)}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state, file)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(f"{args.savefile}.tmp", args.savefile)


@explained  # guard rail: explains errors
def main():
    """Read the flags, make sure that the data is there, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    add = parser.add_argument
    gpus = max(1, torch.cuda.device_count())
    add("-g", "--gpus", type=int, default=gpus, help="GPUs to use; default: all")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step")
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
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
