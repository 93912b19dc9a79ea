"""A real model: ResNet-18 on CIFAR-10, with pretrained weights, gradient accumulation and batch norm under DDP.

Three things are new with a model of this size. A batch may not fit into memory: --accumulate computes it in pieces,
whose gradients add up; DDP would average them after each piece, no_sync() makes it wait for the last. Training need not
begin at zero: --pretrained takes weights that were trained on ImageNet. And batch norm keeps running averages in
buffers, which no gradient changes: DDP copies rank 0's to all ranks before a step, so they come from rank 0's images
only (nn.SyncBatchNorm, on GPUs, would use those of all). The first run downloads the data: give it --timeout 600.

    torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_resnet.py --pretrained
    torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_resnet.py --accumulate 4
    torchrun --standalone --nproc-per-node 3 playground/distributed_data_parallel_resnet.py --gpu_ids 1,6,3 \\
        --batch_size 126
    python playground/distributed_data_parallel_resnet.py --dataset fake    # random images: only to see it run

It prints who is who, how a batch is cut, and a line an epoch (this is --dataset fake; times will differ):

    global batch 128 = 2 ranks x 64 images, in 4 pieces
    epoch 1/3  loss 2.4936  train 9.84%  test 9.50%  9.71 s  185 images/s

Each rank normalises by the mean of its own images, so here the numbers change a little with the number of ranks.

Break it, in a copy:
  1. Leave no_sync() out, with --double --accumulate 8. Do the numbers change? Compare the seconds.
  2. Leave out the factor `len(labels) / len(batch[1])`. What does Adam make of gradients that are 4 times as large?
"""

import argparse
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
from torchvision.transforms import Compose, Normalize, ToTensor
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR
from common.guard_rails import check, explained, meet


def join(args):
    """Join the process group and print who is who. Returns this process's rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    number = args.gpu_ids[local_rank] if args.gpu_ids else local_rank  # NEW: 1,6,3: local rank 0 has GPU 1, and so on
    gpu = torch.device("cuda", number) if args.device == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)  # else every rank would also use GPU 0
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank, device, node = dist.get_rank(), gpu or torch.device("cpu"), os.environ.get("GROUP_RANK", "0")
    me = f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{os.uname().nodename}"
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, me)
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", *everyone, sep="\n", flush=True)
    return rank, device


def download(args):
    """Let torchvision fetch what is not on disk yet."""
    try:
        if args.dataset == "cifar10":
            CIFAR10(args.data_dir, download=True)
        if args.pretrained:
            ResNet18_Weights.DEFAULT.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:
        places = f"CIFAR-10 to {args.data_dir}, {ResNet18_Weights.DEFAULT.url} to ~/.cache/torch/hub/checkpoints"
        sys.exit(f"error: can't fetch ({error}): copy {places}; or use --dataset fake, or leave --pretrained out")


def load(args):
    """Return training and test set: of pairs of an image, (3, 32, 32), and its class, 0 to 9."""
    # the means and standard deviations of ImageNet, which the pretrained weights expect
    transform = Compose([ToTensor(), Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])
    if args.dataset == "cifar10":
        return [CIFAR10(args.data_dir, train, transform) for train in (True, False)]
    return [FakeData(size, (3, 32, 32), 10, transform, random_offset=size) for size in (1800, 200)]


def run_epoch(model, loader, device, optimizer=None, accumulate=1):
    """Train, or test without an optimizer. Returns sums over the images of all ranks: loss, hits, images."""
    model.train(optimizer is not None)
    loss_sum = hits = seen = 0
    for batch in loader:
        if optimizer:
            optimizer.zero_grad()
        pieces = list(
            zip(*(tensor.to(device, non_blocking=True).tensor_split(accumulate) for tensor in batch), strict=True)
        )
        for number, (images, labels) in enumerate(pieces, start=1):
            wait = optimizer and number < len(pieces)  # NEW: average the gradients once, with the last piece
            with model.no_sync() if wait else nullcontext(), torch.set_grad_enabled(optimizer is not None):
                logits = model(images)  # NEW: inside no_sync(), too: DDP makes its preparations here
                loss = F.cross_entropy(logits, labels)
                if optimizer:
                    (loss * len(labels) / len(batch[1])).backward()  # NEW: a mean over the batch, not over the piece
            loss_sum += loss.detach().double() * len(labels)
            hits += (logits.argmax(dim=1) == labels).sum()
            seen += len(labels)
        if optimizer:
            optimizer.step()
    totals = torch.tensor([loss_sum, hits, seen], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()


@record
def train(args):
    """Train, test and report, one line an epoch."""
    rank, device = join(args)
    meet(args)  # guard rail
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)
    train_set, test_set = load(args)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    share = args.batch_size // world_size
    options = {"num_workers": args.workers, "pin_memory": device.type == "cuda"}  # NEW: workers transform the images
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    mine = range(rank, len(test_set), world_size)  # no padding: each test image counts exactly once
    test_loader = DataLoader(test_set, 1000, sampler=mine, **options)
    model = resnet18(weights=ResNet18_Weights.DEFAULT if args.pretrained and rank == 0 else None)
    model.fc = nn.Linear(model.fc.in_features, 10)  # NEW: 10 classes in place of ImageNet's 1000
    model = DistributedDataParallel(model.to(device))  # gives all ranks rank 0's weights
    if rank == 0:
        cut = f"{world_size} ranks x {share} images, in {args.accumulate} pieces"
        print(f"global batch {args.batch_size} = {cut}", flush=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, device, optimizer, args.accumulate)
        seconds = time.perf_counter() - start
        for buffer in model.module.buffers():  # NEW: test with the averages that are saved, rank 0's
            dist.broadcast(buffer, src=0)
        _, test_hits, test_seen = run_epoch(model.module, test_loader, device)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        if rank == 0 and args.savefile:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole
    dist.destroy_process_group()


def main():
    """Read the flags and be one of the ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--dataset", choices=["cifar10", "fake"], default="cifar10", help="fake: random images")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="float64: no rounding to be seen between the lessons")
    add("--pretrained", action="store_true", help="begin with ImageNet's weights (a slow download: raise --timeout)")
    add("--accumulate", type=int, default=1, help="compute each rank's share in so many pieces, which saves memory")
    add("--workers", type=int, default=2, help="processes of each rank that read and transform images")
    add("--gpu_ids", type=lambda text: [int(gpu) for gpu in text.split(",")], help="GPUs of this node, as in 1,6,3")
    add("-s", "--savefile", help="write a checkpoint here after each epoch")
    args = parser.parse_args()
    check(parser, args)  # guard rail
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(f"--batch_size {args.batch_size} can't be shared by {world_size} processes: use {nearest}")
    if args.batch_size // world_size < 2 * args.accumulate:
        parser.error(f"--accumulate {args.accumulate}: batch norm needs pieces of two images or more")
    ids, gpus = args.gpu_ids or [], torch.cuda.device_count() if args.device == "cuda" else 0
    if ids and not int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= len({*ids} & {*range(gpus)}) == len(ids):
        parser.error(f"--gpu_ids {ids}: name a GPU for each process, none twice; there are {gpus} GPUs, from 0")
    if os.environ["LOCAL_RANK"] == "0":
        download(args)  # NEW: once per node; the other ranks wait in join
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
