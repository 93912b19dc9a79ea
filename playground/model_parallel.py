"""Model parallelism: the first half of a model on one device, the second half on another.

Run it:
    python playground/model_parallel.py

It prints the same numbers as `single_gpu.py`, up to rounding (times differ):
    stage1 on cpu, stage2 on cpu
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.55 s  109,000 images/s

With two or more GPUs, two get a half each. Otherwise both halves are on one device. If you have one
GPU, the second half can be on the CPU:
    python playground/model_parallel.py --devices cuda:0 cpu

The halves are called stages. The output of `stage1` (the activations) is copied to the second GPU,
and its gradient is copied back. So a model can be larger than a GPU, but it trains no faster,
because each GPU waits while the other one computes. (Today, such models are trained with FSDP, or
with a process for each stage: `playground/pages/choosing.md`.) Time runs to the right: FFFF is the
forward pass of a batch, BBBB is its backward pass, and dots are waiting:
    stage1 |FFFF........BBBB|
    stage2 |....FFFFBBBB....|

With `--pipelined`, each batch is split into micro-batches. The first GPU computes micro-batch 1
while the second one computes micro-batch 0. Here digits are the forward passes of four
micro-batches, and letters their backward passes. Autograd begins with the last one:
    stage1 |0123..dcba|
    stage2 |.0123dcba.|

The losses stay the same (but for batch norm). On two GPUs, compare the images/s. On one device,
nothing can overlap.
What has changed since `single_gpu.py`:
    git diff -w --patience --no-index playground/{single_gpu,model_parallel}.py

With p stages and m micro-batches, the last stage starts p - 1 turns after the first one, so the
forward passes take m + p - 1 turns, and so do the backward passes. Each GPU waits for (p-1)/(m+p-1)
of them, the bubble (GPipe, https://arxiv.org/abs/1811.06965): 1/2 above (m=1), and 1/5 here (m=4).

Try breaking it, in a copy beside it:
  1. Leave out `.to(self.devices[1])` after `stage1`. What does PyTorch say with two GPUs, and why
     does it say nothing if there is only the CPU?
  2. In `run_epoch()`, split logits and labels with `tensor_split`, and add up the mean losses of
     the micro-batches. How many times too large are the gradients, and why does Adam hardly react?
Builds on: single_gpu.py
This is the last lesson of the ten. `playground/README.md` has the others: choose from them.
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find common/ from any folder
from common import flags
from common.data import fetch, load, whole_batch
from common.models import make_model


class TwoStages(torch.nn.Module):
    """A model whose two stages are on two devices."""

    def __init__(self, model, devices, micro_batches):
        super().__init__()
        self.devices = devices
        self.micro_batches = micro_batches
        # NEW: each stage has a device of its own.
        self.stage1 = model.stage1.to(devices[0])
        self.stage2 = model.stage2.to(devices[1])

    def forward(self, images):
        """Take images on the first device. Return the logits, (N, 10), on the same device."""
        logits = []
        # NEW: calls on a GPU are asynchronous. This loop only puts operations into the queues of
        # the two GPUs (CUDA calls them streams), and does not wait for results. So the first GPU
        # can compute the next micro-batch while the second GPU computes this one.
        for micro_batch in images.tensor_split(self.micro_batches):
            activations = self.stage1(micro_batch).to(self.devices[1])
            logits.append(self.stage2(activations))
        # NEW: run_epoch() computes the loss once for the whole batch, so micro-batches do not
        # change the gradients (but for batch norm). In backward(), autograd copies gradients
        # between devices by itself.
        return torch.cat(logits).to(self.devices[0])


def main():
    """Read the flags, make sure that the data is there, and train."""
    parser = flags.training(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    check_flags(parser, args)
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


def train(args):
    """Put each stage on its device, and train."""
    devices = choose_devices(args)
    print(f"stage1 on {devices[0]}, stage2 on {devices[1]}", flush=True)
    train_loader, test_loader = loaders(args)
    torch.manual_seed(args.seed)
    micro_batches = args.micro_batches if args.pipelined else 1
    model = TwoStages(make_model(args), devices, micro_batches)  # NEW: on two devices
    # fused=True is faster. eps makes the lessons' digits equal: in your project, leave it out.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, devices[0], args)


def choose_devices(args):
    """Return the devices of --devices. By default, these are two GPUs, if there are two."""
    names = args.devices
    if names is None and args.device != "cpu" and torch.accelerator.device_count() > 1:
        names = [f"{args.device}:0", f"{args.device}:1"]
    elif names is None:
        names = [args.device, args.device]
    return [torch.device(name) for name in names]


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    names = ["cpu"]
    if flags.accelerator() != "cpu":
        for number in range(torch.accelerator.device_count()):
            names.append(f"{flags.accelerator()}:{number}")
    add("--devices", nargs=2, choices=names, help="of the two stages; default: two GPUs, or one")
    add("--pipelined", action="store_true", help="split each batch into micro-batches")
    add("--micro_batches", type=flags.positive, default=4, help="in a batch, with --pipelined")


def check_flags(parser, args):
    """Refuse more micro-batches than a batch has images."""
    count = args.micro_batches
    if args.pipelined and count > args.batch_size:
        most = f"a batch has {args.batch_size} images"
        parser.error(f"--micro_batches {count}: {most}: use --micro_batches {args.batch_size}")


# ---------- Unchanged from single_gpu.py ----------
# You know what follows: loaders(), fit_epoch() and run_epoch(). If you copy this, copy them, too.


def loaders(args):
    """Return a DataLoader of the training images, and one of the test images."""
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    # These data sets return whole batches. Yours does not: leave collate_fn out; set num_workers.
    options = {"collate_fn": whole_batch, "pin_memory": args.device != "cpu"}
    sampler = RandomSampler(train_set, generator=torch.Generator())
    # drop_last leaves out an incomplete last batch, which several ranks could not divide equally.
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True, **options
    )
    test_loader = DataLoader(test_set, 1000, **options)
    return train_loader, test_loader


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    # Each epoch has an order of its own. Lesson 6 has the same one, because DistributedSampler
    # shuffles with seed + epoch, too.
    train_loader.sampler.generator.manual_seed(args.seed + epoch)
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None)  # shown in a terminal only
    loss, correct, images = run_epoch(model, bar, device, optimizer)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    digits = 12 if args.double else 4
    print(
        f"{title}  loss {loss / images:.{digits}f}"
        f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
        f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
        flush=True,
    )


def run_epoch(model, loader, device, optimizer=None):
    """Train, or with no optimizer, test. Returns sums: loss, correct, number of images."""
    model.train(optimizer is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    return sums.tolist()


if __name__ == "__main__":
    main()
