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

Break it, in a copy (1 takes a GPU, 2 takes two):
  1. Save `model` in place of `plain`: each key of the checkpoint begins with "module.", and no plain model loads it.
  2. Leave the model on the CPU: DataParallel wants it on the first GPU, whose weights are the ones that count.
"""

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
    if args.device == "cuda":  # NEW: from now on model(images) uses all GPUs; the training loop does not change
        model = nn.DataParallel(model, device_ids=list(range(args.gpus)))
    else:
        print("without a GPU nn.DataParallel does nothing: this is single_gpu.py", file=sys.stderr)
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
            plain = model.module if args.device == "cuda" else model  # NEW: the keys of the plain model
            state = {"model": plain.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)


def main():
    """Fetch the data and train. What goes wrong is told in one line."""
    parser = flags(__doc__, distributed=False)
    parser.add_argument("-g", "--gpus", type=int, default=max(1, torch.cuda.device_count()), help="default: all")
    args = parse(parser)
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
        train(args)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, args)


if __name__ == "__main__":
    sys.exit(main())
