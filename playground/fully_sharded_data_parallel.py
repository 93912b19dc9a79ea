"""Fully sharded data parallelism (FSDP): stage 3 of ZeRO, by PyTorch.

Each rank keeps a shard of every parameter, of its gradient and of Adam's averages. Before a layer
computes, the ranks gather its parameters (all_gather), and afterwards each rank frees them.
backward() gathers them again. It also averages the gradients, and each rank gets the mean gradient
of its shard (reduce_scatter). So FSDP sends 1.5 times as many bytes as DDP.

fully_shard() turns each parameter into a DTensor: a tensor that knows which rank has which shard.
It makes new parameters, so the optimizer must be made after it.

Each call to fully_shard() makes one group of parameters, which travel in one message. So the lesson
calls it for each layer, and finally for the whole model. This outermost call lets FSDP learn the
order of the layers. So while one layer computes in backward(), the ranks already gather the next
one (prefetching).

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

The rows below `gathered` show the gathered bytes while a layer computes. In the forward pass,
memory holds a layer twice: in the buffer that received the message, and copied out of it as
parameters. backward() goes from layer 4 to layer 1, so read its row from right to left. While a
layer computes with its copy, the buffer already has the layer to its left. So for layer 4 memory
holds 2,600 + 16,640 = 19,240 bytes. playground/pictures.md draws these bytes for eight layers.

Try breaking it, in a copy:
  1. Make the optimizer before `shard(model, args)`. How far do the parameters move?
  2. Shard only the whole model, and no layers. How many bytes are gathered at the same time?
  3. Shard only the layers, and not the whole model. What changes in the row `backward`?
  4. Before `model = ...`, seed with `args.seed + rank`. Which rank's parameters are trained?

The next lesson, fully_sharded_checkpoints.py, adds what a long run needs.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
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
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, rank_row(node, rank, local_rank, device))
    if rank == 0:
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def shard(model, args):
    """Keep only a shard of every parameter on each rank. A layer gathers them when it computes."""
    # NEW: a mesh says how the ranks are arranged. Here it is a single row of all ranks.
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    free = not args.keep_weights  # free the gathered parameters after each forward pass
    # The two halves of the model are called stage1 and stage2. They are not stages of ZeRO.
    for layer in (*model.stage1, *model.stage2):
        if list(layer.parameters()):
            # NEW: one message for each layer. A transformer would shard each of its blocks.
            fully_shard(layer, mesh=mesh, reshard_after_forward=free)
    fully_shard(model, mesh=mesh)  # NEW: the whole model, last


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over the images of all ranks: the loss, the number classified correctly, the
    number of images.
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
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    # NEW: equal on all ranks, because each rank keeps a shard of the parameters that it draws.
    torch.manual_seed(args.seed)
    model = make_model(args)
    # NEW: this also moves the shards to the device, one layer after the other.
    shard(model, args)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        # NEW: forward() gathers the layers, so all ranks must call it the same number of times.
        # They do here, because their parts of the test set differ by one image at most, and none is
        # just above a multiple of 1000, the images in a test batch.
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    images, labels = next(iter(train_loader))
    show_sharding(model, optimizer, images.to(device), labels.to(device), args.keep_weights)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--keep_weights", action="store_true", help="parameters stay whole until backward()")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    # The ranks of a node fetch the data one at a time, so it is downloaded once.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
