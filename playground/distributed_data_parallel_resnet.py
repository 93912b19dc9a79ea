r"""A real model: ResNet-18 on CIFAR-10, with pretrained parameters, accumulation and batch norm.

Three things are new with a model of this size:

  - The activations of a batch may not fit in memory. --accumulate splits the batch into
    micro-batches and adds up their gradients. DDP would average the gradients after every
    micro-batch, which gives the same result, but costs more messages. no_sync() turns this off for
    all micro-batches except the last.
  - Training need not begin with random parameters. --pretrained begins with parameters that were
    trained on ImageNet.
  - Batch norm keeps running averages of its inputs in buffers, which are tensors without a
    gradient. DDP copies the buffers of rank 0 to all ranks before each step, so these averages come
    from the images of rank 0 alone. (nn.SyncBatchNorm, on GPUs, uses the images of all ranks.)

Run it. (In the first run, one rank of each node downloads and the others wait: --timeout 600.)
    torchrun --standalone --nproc-per-node 2 \
        playground/distributed_data_parallel_resnet.py --pretrained --timeout 600

Run it on GPUs that you choose. Local ranks 0, 1, 2 get GPUs 1, 6, 3. (3 divides 126.)
    torchrun --standalone --nproc-per-node 3 \
        playground/distributed_data_parallel_resnet.py --gpu_ids 1,6,3 --batch_size 126

Run it on random images, without a download, with four micro-batches in each step:
    torchrun --standalone --nproc-per-node 2 \
        playground/distributed_data_parallel_resnet.py --dataset fake --accumulate 4

It prints the table of ranks, then how a batch is split, then a line for each epoch. The third
command prints (numbers will differ, and random images cannot be recognized):
    global batch 128 = 2 ranks x 64 images, on each rank in 4 micro-batches
    epoch 1/3  loss 2.4936  train 9.84%  test 9.50%  9.71 s  185 images/s

In training, batch norm uses the mean over the images that one rank processes at a time. So the
losses change a little with the number of ranks and of micro-batches.

Try breaking it, in a copy:
  1. Replace `model.no_sync()` with `nullcontext()`, and run it with --double --accumulate 8. Do the
     losses change? Compare the seconds.
  2. Replace `(loss * fraction).backward()` with `loss.backward()`, and run it with --accumulate 4.
     What does Adam make of gradients that are four times as large?

Now write it yourself: accumulate_gradients.py in playground/exercises/.

The next lesson, profile_steps.py, measures where the time of a step goes.
"""

import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import DATA_DIR
from common.guard_rails import check, explained
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet


def gpu_numbers(text):
    """Turn the text 1,6,3 into a list of numbers."""
    return [int(number) for number in text.split(",")]


def download(args):
    """Let torchvision download what is not on disk yet."""
    try:
        if args.dataset == "cifar10":
            CIFAR10(args.data_dir, download=True)
        if args.pretrained:
            ResNet18_Weights.DEFAULT.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        url = ResNet18_Weights.DEFAULT.url
        sys.exit(
            f"error: cannot download ({error}): copy CIFAR-10 to {args.data_dir} and {url} to"
            " ~/.cache/torch/hub/checkpoints; or use --dataset fake, or omit --pretrained"
        )


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


def join(args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        # NEW: --gpu_ids 1,6,3 gives GPU 1 to local rank 0, GPU 6 to local rank 1, and so on.
        number = args.gpu_ids[local_rank] if args.gpu_ids else local_rank
        gpu = torch.device("cuda", number)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    node = os.environ.get("GROUP_RANK", "0")
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, rank_row(node, rank, local_rank, device))
    if rank == 0:
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None, accumulate=1):
    """Train, or only test if there is no optimizer.

    Returns three sums over the images of all ranks: the loss, the number classified correctly, the
    number of images.
    """
    training = optimizer is not None
    model.train(training)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if training:
            optimizer.zero_grad()
        # NEW: as many micro-batches as --accumulate says, but never more than there are images.
        count = min(accumulate, len(labels))
        micro_batches = zip(images.tensor_split(count), labels.tensor_split(count), strict=True)
        for number, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
            # NEW: DDP decides in forward() whether it will average the gradients in backward(). So
            # forward() and backward() are both inside no_sync(), except for the last micro-batch.
            if training and number < count:
                context = model.no_sync()
            else:
                context = nullcontext()
            with context, torch.set_grad_enabled(training):
                logits = model(micro_images)
                loss = F.cross_entropy(logits, micro_labels)
                if training:
                    # NEW: each loss is weighted by the micro-batch's fraction of this rank's batch.
                    # So the losses add up to the batch's mean loss, and so do the gradients.
                    fraction = len(micro_labels) / len(labels)
                    (loss * fraction).backward()
            sums[0] += loss.detach() * len(micro_labels)
            sums[1] += (logits.argmax(dim=1) == micro_labels).sum()
            sums[2] += len(micro_labels)
        if training:
            optimizer.step()
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_set, test_set = load(args)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size
    pin_memory = device.type == "cuda"  # a GPU copies from pinned memory while Python continues
    train_loader = DataLoader(
        train_set,
        per_rank_batch,
        sampler=sampler,
        drop_last=True,
        num_workers=args.workers,  # NEW: processes that read and transform the images
        persistent_workers=args.workers > 0,  # NEW: they stay alive from epoch to epoch
        pin_memory=pin_memory,
    )
    # Each test image counts once. DistributedSampler would repeat some to make the parts equal.
    test_indices = range(rank, len(test_set), world_size)
    test_loader = DataLoader(
        test_set, 1000, sampler=test_indices, num_workers=args.workers, pin_memory=pin_memory
    )
    torch.manual_seed(args.seed)
    weights = None
    if args.pretrained and rank == 0:
        weights = ResNet18_Weights.DEFAULT  # NEW: on rank 0 only; DDP sends them to the others
    model = resnet18(weights=weights)
    model.fc = nn.Linear(model.fc.in_features, 10)  # NEW: 10 classes instead of ImageNet's 1000
    model = model.double() if args.double else model
    model = model.to(device)
    model = DistributedDataParallel(model)
    if rank == 0:
        ranks = f"{world_size} ranks x {per_rank_batch} images"
        print(
            f"global batch {args.batch_size} = {ranks},"
            f" on each rank in {args.accumulate} micro-batches",
            flush=True,
        )
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer, args.accumulate)
        seconds = time.perf_counter() - start
        # NEW: in the last step, each rank has changed its own running averages. Send those of rank
        # 0, so that all ranks test the same model.
        for buffer in model.module.buffers():
            dist.broadcast(buffer, src=0)
        tested = run_epoch(model.module, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--dataset", choices=["cifar10", "fake"], default="cifar10", help="fake: random images")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="compute in float64")
    add("--pretrained", action="store_true", help="begin with parameters trained on ImageNet")
    add("--accumulate", type=int, default=1, help="micro-batches in a step, to save memory")
    add("--workers", type=int, default=2, help="processes of each rank that read the images")
    add("--gpu_ids", type=gpu_numbers, help="GPUs of this node's processes, as in 1,6,3")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size // world_size < 2 * args.accumulate:
        parser.error(f"--accumulate {args.accumulate}: batch norm needs two images at a time")
    if args.gpu_ids:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        gpus = torch.cuda.device_count() if args.device == "cuda" else 0
        repeated = len(set(args.gpu_ids)) < len(args.gpu_ids)
        unknown = [number for number in args.gpu_ids if number not in range(gpus)]
        if repeated or unknown or len(args.gpu_ids) < processes:
            parser.error(
                f"--gpu_ids {args.gpu_ids}: name a GPU for each process, and none twice;"
                f" there are {gpus} GPUs, numbered from 0"
            )
    # NEW: one process on each node downloads. The others wait for it in join().
    if os.environ["LOCAL_RANK"] == "0":
        download(args)
    train(args)


if __name__ == "__main__":
    main()
