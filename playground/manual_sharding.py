"""Sharding by hand, the three stages of ZeRO: the ranks share out what DDP keeps whole on each of them.

With Adam in float32 a weight takes 16 bytes of each rank: 4 itself, 4 its gradient, 8 Adam's two averages. ZeRO
(https://arxiv.org/abs/1910.02054) cuts these into n slices, for n ranks, and a rank keeps only its own:

    --stage 1    of Adam's averages, 8/n: reduce_scatter gives a rank its slice of the mean gradient, its Adam changes
                 that slice of the weights, and all_gather puts the slices of all ranks together
    --stage 2    and of the gradients, 4/n, as soon as backward() has one
    --stage 3    and of the weights, 4/n and the layer at work: put together for forward, and again for backward

    torchrun --standalone --nproc-per-node 2 playground/manual_sharding.py --stage 2

It prints single_gpu.py's numbers, and what it has counted (no activations; 32 of the bytes are Adam's step counters):
    bytes     weights       gradients     Adam's state  together      for a weight  sent in a step
    rank 0    236,840       118,420       236,872       592,132       10.00         236,840
    formula   236,840       118,420       236,840       592,100       10.00         236,840
    DDP       236,840       236,840       473,680       947,360       16.00         236,840

Break it, in a copy: (1) Give Adam `model.parameters()` in place of the slices. What is trained, and what tells you so?
(2) Comment out `dist.broadcast(...)` and seed with `args.seed + rank`. Whose weights do the ranks begin with?
"""

import argparse
import os
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS
from measure.memory import show_memory


def join(args):
    """Join the process group and print who is who. Returns this process's rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    gpu = torch.device("cuda", local_rank) if args.device == "cuda" else None
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


class Shard:
    """A weight of a layer, flat, and this rank's slice of it."""

    def __init__(self, weight, layer, args):
        self.weight, self.stage, self.sent, self.world_size = weight, args.stage, Counter(), dist.get_world_size()
        self.padding = (0, -weight.numel() % self.world_size)  # zeros at the end: all slices have the same size
        self.whole = F.pad(weight.detach().flatten(), self.padding)
        dist.broadcast(self.whole, src=0)  # all ranks start from rank 0's, as with DDP
        weight.data = self.view = self.whole[: weight.numel()].view_as(weight)
        self.mine = self.whole.chunk(self.world_size)[dist.get_rank()]  # NEW: a view: Adam's changes are the weight's
        weight.register_post_accumulate_grad_hook(self.average)  # NEW: backward() calls it when the gradient is there
        if args.stage == 3:
            self.mine = self.mine.clone()  # NEW: all that stays
            self.drop()
            layer.register_forward_pre_hook(self.gather)
            layer.register_forward_hook(self.drop)
            layer.register_full_backward_pre_hook(self.gather)  # NEW: average() drops it again

    def gather(self, *_):
        """Put the slices of all ranks together."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)  # in stage 3 it was empty
        self.weight.data = self.view
        dist.all_gather_single(self.whole, self.mine)
        self.sent["all_gather", (self.world_size - 1) * self.mine.nbytes] += 1

    def drop(self, *_):
        """Free the weight. Autograd keeps a view of it for backward(), so the storage itself has to be emptied."""
        self.whole.untyped_storage().resize_(0)
        self.weight.data = self.weight.new_empty(0)  # whoever uses it before the next gather() gets an error

    def average(self, weight):
        """Keep this rank's slice of the mean gradient."""
        whole = F.pad(weight.grad.flatten(), self.padding)
        mine = whole.chunk(self.world_size)[dist.get_rank()]
        dist.reduce_scatter_single(mine, whole)
        self.sent["reduce_scatter", (self.world_size - 1) * mine.nbytes] += 1
        mine /= self.world_size
        self.mine.grad = mine if self.stage == 1 else mine.clone()  # NEW: a view keeps the whole gradient in memory
        weight.grad = None
        if self.stage == 3:
            self.drop()


def run_epoch(model, loader, device, optimizer=None, shards=()):
    """Train, or test without an optimizer. Returns sums over the images of all ranks: loss, hits, images."""
    model.train(optimizer is not None)
    loss_sum = hits = seen = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for shard in shards:
                shard.gather()  # NEW: each rank has changed its slice of the weights
        loss_sum += loss.detach().double() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
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
    train_set, test_set = load(args.dataset, args.data_dir)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    share = args.batch_size // world_size
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    mine = range(rank, len(test_set), world_size)  # no padding: each test image counts exactly once
    test_loader = DataLoader(test_set, 1000, sampler=mine, **options)
    model = MODELS[args.model](args.width, args.layers).to(device)
    shards = [Shard(weight, layer, args) for layer in model.modules() for weight in layer.parameters(recurse=False)]
    optimizer = torch.optim.Adam([shard.mine for shard in shards], lr=args.lr, eps=1e-6, fused=True)  # NEW: of slices

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, device, optimizer, shards if args.stage < 3 else ())
        seconds = time.perf_counter() - start
        if epoch == 0:
            show_memory(args.stage, shards, optimizer, len(train_loader))
        _, test_hits, test_seen = run_epoch(model, test_loader, device)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        for shard in shards if args.savefile else ():
            shard.gather()  # NEW: on all ranks
        if rank == 0 and args.savefile:
            state = {"model": model.state_dict()}  # NEW: without Adam's averages, of which each rank has a slice
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
    add("--stage", type=int, choices=[1, 2, 3], default=3, help="1: Adam's state, 2: also gradients, 3: also weights")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--model", choices=MODELS, default="mlp")
    add("--width", type=int, help="neurons in each hidden layer; default: 64 (mlp), 120 (cnn)")
    add("--layers", type=int, help="hidden layers, the linear ones in cnn; default: 3 (mlp), 1 (cnn)")
    add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits where it can't be had")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="float64: no rounding to be seen between the lessons")
    add("-s", "--savefile", help="write a checkpoint here after each epoch")
    args = parser.parse_args()
    check(parser, args)  # guard rail
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(f"--batch_size {args.batch_size} can't be shared by {world_size} processes: use {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # one rank of a node at a time
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
