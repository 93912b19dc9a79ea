r"""A real model: ResNet-18 on CIFAR-10, with pretrained parameters, accumulation and batch norm.

Run it:
    torchrun --standalone --nproc-per-node 2 \
        playground/replicated/resnet.py --pretrained --timeout 600
`--pretrained` begins with parameters that were trained on ImageNet. In the first run, one rank of
each node downloads them and the images. All others wait for it, so `--timeout` is 600 seconds.

Run it on random images, without a download. Each rank splits its part of a batch into four
micro-batches, and adds up their gradients:
    torchrun --standalone --nproc-per-node 2 \
        playground/replicated/resnet.py --dataset fake --accumulate 4

It prints (numbers differ a little, and random images cannot be recognized):
    global batch 128 = 2 ranks x 64 images, on each rank in 4 micro-batches
    epoch 1/3  loss 2.6088  train 10.16%  test 8.00%  9.71 s  185 images/s

Gradient accumulation saves memory, because only the activations of one micro-batch are kept at a
time. DDP needs to average the gradients only once in a step, after the last micro-batch.

In training, batch norm uses the mean and the variance of the images that one rank processes at a
time, so the losses change a little with the number of ranks and of micro-batches. For the test, it
keeps running averages in buffers, which are tensors without a gradient. Before each step and before
the test, DDP copies those of rank 0 to all ranks, so they come from the images of rank 0 alone.
(nn.SyncBatchNorm, on GPUs, uses the images of all ranks.)

To use GPUs 1, 6 and 3 of a node, put CUDA_VISIBLE_DEVICES=1,6,3 in front of torchrun, and start
three ranks, with a `--batch_size` that three ranks can divide, such as 126.

Try breaking it, in a copy beside it:
  1. Replace `model.no_sync()` with `nullcontext()`, and run it with `--double --accumulate 8`. Do
     the losses change? Compare the seconds.
  2. Replace `(loss * fraction).backward()` with `loss.backward()`, and run it with
     `--accumulate 4`. What does Adam make of gradients that are four times as large?
Now repair `accumulated.py` in `playground/museum/`.
Builds on: distributed_data_parallel_torchrun.py
The next lesson, `resumable.py`, resumes after a process has died.
"""

import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10, FakeData
from torchvision.models import ResNet18_Weights, resnet18
from torchvision.transforms import Compose, ConvertImageDtype, Normalize, PILToTensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import DATA_DIR


def accumulate_gradients(model, images, labels, count):
    """Compute the gradients of a batch in micro-batches. Returns the logits and the mean loss."""
    count = min(count, len(labels))
    mean_loss = 0
    all_logits = []
    micro_batches = zip(images.tensor_split(count), labels.tensor_split(count), strict=True)
    for number, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
        # NEW: DDP would average the gradients after every micro-batch, which gives the same result,
        # but costs more messages. no_sync() turns this off for all micro-batches except the last.
        # DDP decides in forward() what it will do in backward(), so both are inside the `with`.
        is_last = number == count
        context = nullcontext() if is_last else model.no_sync()
        with context:
            logits = model(micro_images)
            loss = F.cross_entropy(logits, micro_labels)
            # NEW: each loss is weighted by the micro-batch's fraction of this rank's batch. So the
            # losses add up to the batch's mean loss, and so do the gradients.
            fraction = len(micro_labels) / len(labels)
            (loss * fraction).backward()  # adds to the gradients that are there already
        mean_loss += loss.detach() * fraction
        all_logits.append(logits.detach())
    return torch.cat(all_logits), mean_loss


def update(model, optimizer, count, images, labels):
    """Make a step of the optimizer. Returns the logits and the mean loss."""
    optimizer.zero_grad()
    logits, loss = accumulate_gradients(model, images, labels, count)
    optimizer.step()
    return logits, loss


def train(args):
    """Train a ResNet as one of the ranks that torchrun has started."""
    rank, device = join(args)
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    torch.manual_seed(args.seed)
    # To freeze layers, do it here: DDP would not average what is unfrozen later.
    model = make_model(args, rank).to(device)
    model = DistributedDataParallel(model)
    if rank == 0:
        print(
            f"global batch {args.batch_size} = {world_size} ranks x"
            f" {args.batch_size // world_size} images,"
            f" on each rank in {args.accumulate} micro-batches",
            flush=True,
        )
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    # NEW: fit_epoch() hands this function to run_epoch() in place of the optimizer.
    step = partial(update, model, optimizer, args.accumulate)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, step, train_loader, test_loader, device, args)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model, step  # the function refers to DDP
    dist.destroy_process_group()


def run_epoch(model, loader, device, step=None):
    """Train by calling step(images, labels) for each batch, or only test if there is none.

    Returns three sums over the images of all ranks: the loss, the number classified correctly, the
    number of images.
    """
    model.train(step is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if step is not None:
            logits, loss = step(images, labels)
        else:
            with torch.no_grad():
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
        sums[0] += loss * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


def make_model(args, rank):
    """Return ResNet-18 for ten classes."""
    model = resnet18()
    if args.pretrained and rank == 0:  # NEW: on rank 0 only, because DDP sends them to all
        model.load_state_dict(pretrained())
    model.fc = nn.Linear(model.fc.in_features, 10)  # NEW: 10 classes instead of ImageNet's 1000
    return model.double() if args.double else model


def loaders(args, rank, world_size):
    """Return a DataLoader of this rank's training images, and one of its test images."""
    train_set, test_set = load(args)
    options = {
        "num_workers": args.workers,  # NEW: processes that read and transform the images
        # NEW: a worker may fail, or never answer. By default, the rank would wait for ever.
        "timeout": args.timeout if args.workers > 0 else 0,
        "pin_memory": args.device != "cpu",
    }
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    train_loader = DataLoader(
        train_set,
        args.batch_size // world_size,
        sampler=sampler,
        drop_last=True,
        persistent_workers=args.workers > 0,  # NEW: the workers stay from epoch to epoch
        **options,
    )
    # Each test image counts once, and all ranks have equally many batches.
    batches = torch.arange(len(test_set)).tensor_split(len(test_set) // 1000 + 1)
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    test_loader = DataLoader(test_set, batch_sampler=own_batches, **options)
    return train_loader, test_loader


def load(args):
    """Return the training set and the test set: images of shape (3, 32, 32) and their classes."""
    transform = Compose(
        [
            PILToTensor(),
            ConvertImageDtype(torch.float64 if args.double else torch.float32),
            # NEW: the pretrained parameters expect ImageNet's means and standard deviations.
            Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    if args.dataset == "cifar10":
        train_set = CIFAR10(args.data_dir, train=True, transform=transform)
        test_set = CIFAR10(args.data_dir, train=False, transform=transform)
    else:
        train_size = 1800
        test_size = 200
        shape = (3, 32, 32)
        # NEW: image i is made with the seed i + random_offset. The seeds of the two sets differ,
        # so no image is in both.
        train_set = FakeData(train_size, shape, 10, transform, random_offset=train_size)
        test_set = FakeData(test_size, shape, 10, transform, random_offset=test_size)
    return train_set, test_set


def pretrained():
    """Return parameters that were trained on ImageNet. Downloads them if they are not on disk."""
    # weights_only: a file from elsewhere must not run code.
    return ResNet18_Weights.DEFAULT.get_state_dict(
        progress=False, check_hash=True, weights_only=True
    )


def download(args):
    """Let torchvision download what is not on disk yet."""
    try:
        if args.dataset == "cifar10":
            CIFAR10(args.data_dir, download=True)
        if args.pretrained:
            pretrained()
    except (OSError, RuntimeError) as error:
        url = ResNet18_Weights.DEFAULT.url
        sys.exit(
            f"error: cannot download ({error}): copy CIFAR-10 to {args.data_dir} and {url} to"
            " ~/.cache/torch/hub/checkpoints; or use --dataset fake, or omit --pretrained"
        )


# ---------- Nearly as in distributed_data_parallel_torchrun.py ----------
# Read only what is marked NEW. The flags are those of this model and its data.


@record
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    # NEW: one rank of each node downloads. The others wait for it in join(), so for --timeout
    # seconds at most.
    if os.environ["LOCAL_RANK"] == "0":
        download(args)
    train(args)


def add_flags(parser):
    """Add the flags of this lesson, which has a model and data of its own."""
    add = parser.add_argument
    add("--epochs", type=flags.positive, default=3)
    add("--batch_size", type=flags.positive, default=128, help="images in a step, over all ranks")
    add("--accumulate", type=flags.positive, default=1, help="micro-batches, to save memory")
    add("--lr", type=flags.number, default=1e-3, help="Adam's learning rate")
    add("--pretrained", action="store_true", help="begin with parameters trained on ImageNet")
    add("--dataset", choices=["cifar10", "fake"], default="cifar10", help="fake: random images")
    folder = os.path.expanduser
    add("--data_dir", type=folder, default=DATA_DIR, help="default: data/ beside playground/")
    workers = flags.between(int, 0, 1000, "0 or more")
    add("--workers", type=workers, default=2, help="processes of each rank that read the images")
    add("--seed", type=flags.seed, default=0)
    add("--double", action="store_true", help="compute in float64, and print 12 digits")
    add("--device", type=flags.device, default=flags.accelerator(), help="default: the accelerator")
    add("--timeout", type=flags.positive, default=60, help="seconds to wait for a rank or a worker")


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks."""
    parser.check_batch(args.batch_size, world_size)
    if args.batch_size // world_size < 2 * args.accumulate:
        parser.error(f"--accumulate {args.accumulate}: batch norm needs two images at a time")


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join() and fit_epoch(). If you copy this lesson, copy this, too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device, gpu = torch.device(args.device), None  # gpu stays None on a CPU
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()  # torchrun has set it, the world size and the address of rank 0
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    rank = dist.get_rank()
    train_loader.sampler.set_epoch(epoch)  # without this, all epochs have the same order
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, images = run_epoch(model, bar, device, optimizer)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    if rank == 0:
        digits = 12 if args.double else 4
        peak = ""  # of the memory that this rank's tensors have taken on its GPU
        if args.device != "cpu":
            peak = f"  {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB"
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s{peak}",
            flush=True,
        )


if __name__ == "__main__":
    main()
