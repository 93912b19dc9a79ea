"""Fully sharded data parallelism (FSDP): stage 3 of ZeRO, by PyTorch.

Each rank keeps a shard of every parameter, of its gradient and of Adam's averages. Before a layer
computes, the ranks gather its parameters (all_gather), and afterwards each rank frees them.
backward() gathers them again. It also averages the gradients, and each rank gets the mean gradient
of its shard (reduce_scatter). So FSDP sends 1.5 times as many bytes as DDP.

fully_shard() turns each parameter into a DTensor: a tensor that knows which rank has which shard.
It makes new parameters, so the optimizer must be made after it.

Each call to fully_shard() makes one group of parameters, which travel in one message. So the lesson
calls it for each layer, and finally for the whole model. This outermost call does two things. It
shards the parameters that are in none of the layers (here there are none), and it lets FSDP learn
the order of the layers. So while one layer computes in backward(), the ranks already gather the
next one (prefetching).

With --keep_weights, the parameters stay whole from the forward pass to backward(). Then FSDP sends
as many bytes as DDP, but needs more memory.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/fully_sharded_data_parallel.py

It prints the same numbers as single_gpu.py. Then it counts what the ranks hold and send in one more
step:
    bytes     parameters    gradients     Adam's state  together      /parameter    sent in a step
    rank 0    118,420       118,420       236,872       473,712       8.00          355,260
    DDP       236,840       236,840       473,680       947,360       16.00         236,840
    gathered  layer 1       layer 2       layer 3       layer 4
    forward   401,920       33,280        33,280        5,200
    backward  200,960       217,600       33,280        19,240
    messages of a step: 8 all_gather, 4 reduce_scatter, 0 all_reduce. DDP: one for each bucket

The last two columns of the first table are the bytes for each parameter, and the bytes that a rank
sends in a step. The rows below `gathered` show the gathered bytes while a layer computes. In the
forward pass, memory holds a layer twice: in the buffer that received the message, and copied out of
it as parameters. backward() goes from layer 4 to layer 1, so read its row from right to left. While
a layer computes with its copy, the buffer already has the layer to its left. So for layer 4 memory
holds 2,600 + 16,640 = 19,240 bytes. playground/pictures.md draws these bytes for a model
with eight layers.

DDP's first bucket holds up to 1 MiB of gradients, and every later bucket up to 25 MiB. So DDP would
need one message for this model.

Try breaking it, in a copy:
  1. Make the optimizer before `shard(model, args)`. How far do the parameters move?
  2. Shard only the whole model, and no layers. How many bytes are gathered at the same time?
  3. Shard only the layers, and not the whole model. What changes in the row `backward`?
  4. Write `torch.manual_seed(args.seed + rank)`. Which rank's parameters are trained?

The next lesson, fully_sharded_checkpoints.py, adds what a long run needs.
"""

import argparse
import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import MODELS
from common.roll_call import meet
from measure.shards import show_sharding


def join(args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
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
    row = f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", *rows, sep="\n", flush=True)
    return rank, device


def shard(model, args):
    """Keep only a shard of every parameter on each rank. A layer gathers them when it computes."""
    # NEW: a mesh says how the ranks are arranged. Here it is a single row of all ranks.
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    free = not args.keep_weights  # free the gathered parameters after each forward pass
    # The two halves of the model are called stage1 and stage2. They are not stages of ZeRO.
    for layer in (*model.stage1, *model.stage2):
        if list(layer.parameters()):
            # NEW: one message for each layer. A transformer would shard each of its blocks.
            fully_shard(layer, mesh=mesh, reshard_after_forward=free)
    fully_shard(model, mesh=mesh)  # NEW: the whole model, last


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over the images of all ranks: the losses, the images that were recognized,
    the images.
    """
    training = optimizer is not None
    model.train(training)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        totals[0] += loss.detach() * len(labels)
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    return totals.tolist()


@record
def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)
    # NEW: equal on all ranks, because each rank keeps a shard of the parameters that it draws.
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size
    pin_memory = device.type == "cuda"  # a GPU copies from pinned memory while Python continues
    train_loader = DataLoader(
        train_set,
        per_rank_batch,
        sampler=sampler,
        drop_last=True,
        collate_fn=whole_batch,  # common/data.py's data sets return whole batches already
        pin_memory=pin_memory,
    )
    # Each test image counts once. DistributedSampler would repeat some to make the parts equal.
    test_indices = range(rank, len(test_set), world_size)
    test_loader = DataLoader(
        test_set, 1000, sampler=test_indices, collate_fn=whole_batch, pin_memory=pin_memory
    )
    model = MODELS[args.model](args.width, args.layers)
    # NEW: this also moves the shards to the device, one layer after the other.
    shard(model, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        # The order differs from epoch to epoch, and it is the same on all ranks and in each run.
        sampler.set_epoch(epoch)
        start = time.perf_counter()
        hidden = None if rank == 0 else True  # None: the bar is hidden if there is no terminal
        progress = tqdm(train_loader, leave=False, disable=hidden)
        loss_sum, hits, seen = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        # NEW: forward() gathers the layers, so all ranks must call it equally often. They do here,
        # because their parts of the test set differ by one image at most, and none is just above a
        # multiple of 1000, the images in a test batch.
        _, test_hits, test_seen = run_epoch(model, test_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum / seen:.4f}"
                f"  train {hits / seen:.2%}  test {test_hits / test_seen:.2%}"
                f"  {seconds:.2f} s  {seen / seconds:,.0f} images/s",
                flush=True,
            )
        if args.savefile:
            # NEW: all ranks gather one parameter after the other, and rank 0 keeps it on its CPU.
            on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
            state = {"model": get_model_state_dict(model, options=on_rank_0)}
            state |= {"epoch": epoch + 1, "args": vars(args)}
        if rank == 0 and args.savefile:
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state, file)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(f"{args.savefile}.tmp", args.savefile)
    images, labels = next(iter(train_loader))
    show_sharding(model, optimizer, images.to(device), labels.to(device), args.keep_weights)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=argparse.SUPPRESS,
    )
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--lr", type=float, default=1e-3, help="Adam's learning rate")
    add("--model", choices=MODELS, default="mlp")
    add("--width", type=int, help="neurons in each hidden layer; default: 64 (mlp), 120 (cnn)")
    add("--layers", type=int, help="hidden linear layers; default: 3 (mlp), 1 (cnn)")
    add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits without mnist")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="compute in float64, so that lessons agree exactly")
    add("--keep_weights", action="store_true", help="parameters stay whole until backward()")
    add("-s", "--savefile", help="write a checkpoint to this file after each epoch")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(
            f"--batch_size {args.batch_size} cannot be divided by {world_size} processes:"
            f" use --batch_size {nearest}"
        )
    # The ranks of a node fetch the data one at a time, so it is downloaded once.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
