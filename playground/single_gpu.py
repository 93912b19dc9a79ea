"""One process on one device: the plain training loop that later lessons change.

All of it is ordinary PyTorch. The later lessons keep these functions, with the same names and in
the same order. A line that carries a new idea is marked NEW, with the reason. To see what is new in
a lesson, compare two files:

    git diff --no-index playground/single_gpu.py playground/data_parallel.py

The networks, the data sets, their flags and the format of what is printed are in common/, because
no lesson is about them.

Run it:
    python playground/single_gpu.py
    python playground/single_gpu.py --model cnn --epochs 1

It uses a GPU if there is one, and the CPU otherwise.

It prints (times will differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.52 s  115,200 images/s

The training loss and accuracy are averages over the epoch, during which the model changes. An epoch
trains on 59,904 of the 60,000 images, because the last batch would be incomplete and is left out.
The test accuracy is measured on all 10,000 test images after the epoch. With --double, the lesson
computes in float64 and prints the loss with twelve digits. Later lessons, with many processes,
print the same twelve digits.

Try breaking it, in a copy (cp playground/single_gpu.py playground/broken.py):
  1. Comment out `generator.manual_seed(...)`. The batches then come in a different order. Compare
     the losses.
  2. Comment out `optimizer.zero_grad()`. Which gradients does each step use then? Compare the
     losses.

The next lesson, data_parallel.py, lets one process use several GPUs.
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import make_model
from common.report import bar, epoch_line


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over all images: the loss, the number classified correctly, the number of
    images.
    """
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
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch."""
    device = torch.device(args.device)
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    generator = torch.Generator()
    sampler = RandomSampler(train_set, generator=generator)
    pin_memory = device.type == "cuda"  # a GPU copies from pinned memory while Python continues
    train_loader = DataLoader(
        train_set,
        args.batch_size,
        sampler=sampler,
        drop_last=True,
        # The method __getitems__ of these data sets takes the indices of a batch and returns the
        # whole batch, so there are no single images to collate. For a data set of your own, leave
        # collate_fn out.
        collate_fn=whole_batch,
        pin_memory=pin_memory,
    )
    test_loader = DataLoader(test_set, 1000, collate_fn=whole_batch, pin_memory=pin_memory)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    # fused=True updates all parameters in one pass, which is faster. Adam divides by the size of
    # the gradient, plus eps. With PyTorch's default eps, 1e-8, a gradient that is only a rounding
    # error would cause a full step, so the lessons would print different losses. In your own
    # project, keep the default.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        # The order differs from epoch to epoch, and it is the same in each run.
        generator.manual_seed(args.seed + epoch)
        start = time.perf_counter()
        trained = run_epoch(model, bar(train_loader), device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        print(epoch_line(args, epoch, seconds, trained, tested), flush=True)


@explained  # guard rail: explains errors
def main():
    """Read the flags, make sure that the data is there, and train."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--batch_size", type=int, default=128, help="images in a step")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
