"""One process on one device: the plain training loop that all later lessons change.

Run it:
    python playground/single_gpu.py

It prints a line for each epoch (times differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.25 s  235,016 images/s

All of it is ordinary PyTorch, in the order in which it is called: `train()` makes the model and the
optimizer, and loops over epochs, `fit_epoch()` trains and tests, and `run_epoch()` loops over
batches. The training loss and accuracy are means over an epoch, during which the model changes, and
the test accuracy is measured after it. The models, the data sets and their flags are in `common/`,
which you need not read.

Later lessons have functions of the same names, in the same order. In the code, NEW marks a line
that carries a new idea. To see all that is new in a lesson, compare two files, as here for DDP:
    git diff -w --patience --no-index playground/{single_gpu,distributed_data_parallel}.py

With one process or several, the numbers agree up to rounding. To show this, `--double` computes in
float64, and nearly all lessons then print the same twelve digits. (For this, Adam's eps is larger
than usual: otherwise Adam makes a full step even where a gradient is only a rounding error.)
    python playground/single_gpu.py --double --dataset digits --batch_size 120 --epochs 2
    epoch 1/2  loss 2.123594752907  train 42.64%  test 71.72%  0.01 s  99,145 images/s
    epoch 2/2  loss 1.406419734911  train 72.43%  test 85.19%  0.01 s  155,457 images/s

Try breaking it, in a copy (`cp playground/single_gpu.py playground/broken.py`):
  1. Comment out the line with `manual_seed` in `fit_epoch()`. Do the losses differ from those
     above? Run it again: do they differ from run to run, and why not?
  2. Comment out the line with `optimizer.zero_grad()`. Which gradients does each step use then?
The next lesson, `data_parallel.py`, lets one process use several GPUs.
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


def main():
    """Read the flags, make sure that the data is there, and train."""
    parser = flags.training(__doc__)  # --model, --dataset, --epochs and so on
    args = parser.parse_args()
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


def train(args):
    """Make the loaders, the model and the optimizer, and train."""
    device = torch.device(args.device)
    train_loader, test_loader = loaders(args)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    # fused=True is faster. eps makes the lessons' digits equal: in your project, leave it out.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)


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
    # NEW: each epoch has an order of its own. Lesson 6 has the same one, because DistributedSampler
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
