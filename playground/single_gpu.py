"""One process on one device: the plain training loop that later lessons change.

All of it is ordinary PyTorch. The later lessons keep these functions, with the same names and in
the same order. A line that carries a new idea is marked NEW, with the reason. To see what is new in
a lesson, compare two files:

    git diff --no-index playground/single_gpu.py playground/data_parallel.py

Run it:
    python playground/single_gpu.py
    python playground/single_gpu.py --model cnn --epochs 1 --savefile checkpoints/cnn.pt

It uses a GPU if there is one, and the CPU otherwise.

It prints (times will differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.52 s  115,200 images/s

An epoch trains on 59,904 of the 60,000 training images, because the last batch would be incomplete
and is left out. The test accuracy is measured on all 10,000 test images.

Try breaking it, in a copy (cp playground/single_gpu.py playground/broken.py):
  1. Comment out `generator.manual_seed(...)`. The batches then come in a different order. Compare
     the losses.
  2. Comment out `optimizer.zero_grad()`. Which gradients does each step use then? Compare the
     losses.

The next lesson, data_parallel.py, lets one process use several GPUs.
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
    # fused=True updates all parameters in one pass, which is faster. Adam divides the average
    # gradient by the root of the average squared gradient, plus eps. With PyTorch's default, 1e-8,
    # a gradient that is only a rounding error would cause a full step, and the lessons would
    # differ. In your own project, keep the default.
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
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
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
