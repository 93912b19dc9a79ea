"""Model parallelism: one model on two devices, with and without pipelining.

A model that is too large for one GPU can be cut in two: the first stage lives on one GPU, the second on another, and
the activations travel from here to there, the gradients back. That gives room, not speed, as one GPU always waits for
the other. --pipelined cuts the batch into micro-batches, so that the first GPU works on the next while the second
works on the one before. For p stages and m micro-batches (p-1)/(m+p-1) of the time is still idle (GPipe, arXiv
1811.06965). A CPU does one thing at a time for one process: there nothing overlaps, and pipelining only adds work, as
the timeline at the end shows. pipeline_parallel.py has a process for each stage.

    python playground/model_parallel.py                                 # two GPUs, else both stages on one device
    python playground/model_parallel.py --pipelined --micro_batches 8 --plot timeline.png
    python playground/model_parallel.py --devices cuda:0 cpu

The numbers are those of single_gpu.py (times will differ):

    stage1 on cpu, stage2 on cpu
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.55 s  109,000 images/s

Break it, in a copy:
  1. Leave out `.to(devices[1])` after stage1, with two GPUs: stage2 says where it is and where its input is.
  2. Take the mean loss of each micro-batch and add these up: why are the gradients micro_batches times too large?
     And why does Adam hardly mind?
"""

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
from common.data import fetch, load, whole_batch
from common.flags import flags, parse
from common.guard_rails import explain
from common.models import MODELS
from common.profiling import profiled
from common.timeline import show, watch_modules


def forward(model, images, devices, micro_batches):
    """Run both stages, each on its own device. Returns the logits, float32 (N, 10), on the second device."""
    logits = []
    for piece in images.to(devices[0]).tensor_split(micro_batches):  # NEW: one piece if not pipelined
        activations = model.stage1(piece).to(devices[1])  # only queued on the GPUs: Python goes on
        logits.append(model.stage2(activations))  # queued on the second, while the first goes on with the next piece
    return torch.cat(logits)  # one loss for the batch, so the gradients are those of the undivided batch


def run_epoch(model, loader, devices, micro_batches, optimizer=None):
    """Train, or test without an optimizer, on each batch. Returns the sums of loss, hits, images, float64 (3,)."""
    model.train(optimizer is not None)
    totals = torch.zeros(3, dtype=torch.float64, device=devices[1])  # read once an epoch: that waits for the GPU
    loss_sum, hits, seen = totals  # views: what is added to them is added to totals
    for images, labels in loader:
        labels = labels.to(devices[1])  # NEW: the loss is where stage2 is
        with torch.set_grad_enabled(optimizer is not None):
            logits = forward(model, images, devices, micro_batches)  # NEW: backward() finds its way back alone
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss_sum += loss.detach() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    return totals


def observe(model, batch, devices, micro_batches, plot):
    """Show when each stage computes, with micro-batches and in one piece."""
    images, labels, steps = batch[0], batch[1].to(devices[1]), {}

    def step(pieces):
        F.cross_entropy(forward(model, images, devices, pieces), labels).backward()

    for pieces in sorted({micro_batches, 1}, reverse=True):
        stages = [model.stage1, model.stage2]
        steps["one process", pieces] = watch_modules(partial(step, pieces), stages, list(map(torch.device, devices)))
    show(steps, ["stage1", "stage2"], plot)
    if len(set(devices)) == 1:
        print(f"Both stages are on {devices[0]}, in one process: nothing can overlap. With a process for each it does:")
        print("python playground/pipeline_parallel.py -g 2", flush=True)


def train(args):
    """Train, test and report, one line an epoch; then show who computes when."""
    devices, micro_batches = args.devices, args.micro_batches if args.pipelined else 1
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, collate_fn=whole_batch)
    test_loader = DataLoader(test_set, 1000, collate_fn=whole_batch)
    model = MODELS[args.model](args.width, args.layers)
    model.stage1.to(devices[0])  # NEW: each stage moves to its own device
    model.stage2.to(devices[1])
    print(f"stage1 on {devices[0]}, stage2 on {devices[1]}", flush=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)  # 1e-8 makes steps of rounding errors

    for epoch in range(args.epochs):
        order.manual_seed(args.seed + epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None)  # None: only on a terminal
        steps = profiled(bar, args.profile)
        loss, hits, seen = run_epoch(model, steps, devices, micro_batches, optimizer).tolist()
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, devices, micro_batches).tolist()
        line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
        line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
        print(line, flush=True)
        if args.savefile:  # under another name first: a crash on the way leaves the last one whole
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)
    observe(model, next(iter(train_loader)), devices, micro_batches, args.plot)


def main():
    """Fetch the data and train. What goes wrong is told in one line."""
    parser = flags(__doc__, distributed=False)
    parser.add_argument("--devices", nargs=2, help="of stage1 and stage2; default: the first two GPUs, or one twice")
    parser.add_argument("--pipelined", action="store_true", help="cut each batch into micro-batches")
    parser.add_argument("--micro_batches", type=int, default=4, help="how many, with --pipelined")
    parser.add_argument("--plot", metavar="PNG", help="draw the timeline into this file")
    args = parse(parser)
    if args.devices is None:
        args.devices = (
            ["cuda:0", "cuda:1"] if args.device == "cuda" and torch.cuda.device_count() > 1 else [args.device] * 2
        )
    try:
        torch.empty(1, device=args.devices[0]), torch.empty(1, device=args.devices[1])
    except (RuntimeError, AssertionError):
        parser.error(
            f"--devices {' '.join(args.devices)}: choose from cpu and {torch.cuda.device_count()} GPUs, cuda:0 and on"
        )
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
        train(args)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, args)


if __name__ == "__main__":
    sys.exit(main())
