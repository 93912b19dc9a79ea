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
  2. Comment out `optimizer.zero_grad()`: each step adds to the gradients of all before, and it hardly learns.
"""

import os
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import fetch, load, whole_batch
from common.flags import flags, parse
from common.guard_rails import explain
from common.models import MODELS
from common.profiling import profiled


def run_epoch(model, loader, device, optimizer=None):
    """Train, or test without an optimizer, on each batch. Returns the sums of loss, hits, images, float64 (3,)."""
    model.train(optimizer is not None)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # read once an epoch: that waits for the GPU
    loss_sum, hits, seen = totals  # views: what is added to them is added to totals
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss_sum += loss.detach() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    return totals


def train(args):
    """Train, test and report, one line an epoch."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, collate_fn=whole_batch)
    test_loader = DataLoader(test_set, 1000, collate_fn=whole_batch)
    model = MODELS[args.model](args.width, args.layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)  # 1e-8 makes steps of rounding errors

    for epoch in range(args.epochs):
        order.manual_seed(args.seed + epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None)  # None: only on a terminal
        steps = profiled(bar, args.profile)
        loss, hits, seen = run_epoch(model, steps, device, optimizer).tolist()
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, device).tolist()
        line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
        line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
        print(line, flush=True)
        if args.savefile:  # under another name first: a crash on the way leaves the last one whole
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)


def main():
    """Fetch the data and train. What goes wrong is told in one line."""
    parser = flags(__doc__, distributed=False)
    args = parse(parser)
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
        train(args)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, args)


if __name__ == "__main__":
    sys.exit(main())
