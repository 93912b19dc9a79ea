"""Fully sharded data parallelism (FSDP): stage 3 of ZeRO, by PyTorch.

fully_shard(layer) does what ShardedLayer of the previous lesson does. It shards the parameters of a
layer and adds hooks, which gather them (all_gather) before the layer computes and free them after.
In backward(), they also average the gradients (reduce_scatter). It turns each parameter into a
DTensor: a tensor that knows which rank has which shard. These are new parameters, so the optimizer
must be made after fully_shard().

The lesson calls it for each layer, and finally for the whole model. This last call takes all
parameters that are left, and gives the layers a common list. In the forward pass, each layer adds
itself to the list after it has computed. backward() reads the list from its end, so it knows which
layer comes next, and gathers it while the current layer still computes (prefetching). In the
forward pass, FSDP does not know which layer comes next, so it gathers a layer when it is called.
(On a GPU this costs little. Python runs ahead, and starts the next all_gather while the GPU still
computes the current layer.)

Run it:
    torchrun --standalone --nproc-per-node 2 playground/fully_sharded_data_parallel.py
    torchrun --standalone --nproc-per-node 4 playground/fully_sharded_data_parallel.py --meta

It prints the same numbers as single_gpu.py. Then it counts what the ranks hold and send in one more
step:
    bytes     parameters    gradients     Adam's state  together      /parameter    sent in a step
    rank 0    118,420       118,420       236,872       473,712       8.00          355,260
    DDP       236,840       236,840       473,680       947,360       16.00         236,840
    forward   layer 1       layer 2       layer 3       layer 4
    gathered  401,920       33,280        33,280        5,200
    backward  layer 4       layer 3       layer 2       layer 1
    gathered  19,240        33,280        217,600       200,960
    messages of a step: 8 all_gather, 4 reduce_scatter, 0 all_reduce. DDP: one for each bucket

The rows "gathered" have the bytes of whole parameters while a layer computes. In the forward pass,
memory holds each layer twice: in the buffer that received the message, and copied out of it. In
backward(), it holds a layer once, and the buffer already has the one before it. For layer 4, these
are 2,600 bytes, and 16,640 of layer 3. playground/pictures.md draws this for eight layers.

Try breaking it, in a copy:
  1. Make the optimizer before `shard(model, args)`. How far do the parameters move?
  2. Shard only the whole model, and no layers. How many bytes are gathered at the same time?
  3. Shard only the layers, and not the whole model. What changes in the last row of bytes?
  4. Before `model = ...`, seed with `args.seed + rank`. Which rank's parameters are trained?

The next lesson, fully_sharded_checkpoints.py, saves and resumes such a run.
"""

import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders, whole_batch
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.shards import show_sharding


def shard(model, args):
    """Keep only a shard of every parameter on each rank. A layer gathers them when it computes."""
    # NEW: a mesh arranges the ranks of the process group. Here it is a single row of all ranks.
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


def fill(model, args, device):
    """Give a sharded model, which is on the meta device, memory and the parameters of rank 0."""
    # A buffer that is not persistent is in no state. A model that has one must compute it again.
    model.to_empty(device=device)
    state = make_model(args).state_dict() if dist.get_rank() == 0 else {}
    # NEW: rank 0 has all values, and sends each rank its shards, one parameter after the other.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)


def equal_batches(test_set, rank, world_size):
    """Return a loader of this rank's test images, with as many batches as on all other ranks."""
    batches = torch.arange(len(test_set)).tensor_split(math.ceil(len(test_set) / 1000))
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    return DataLoader(test_set, batch_sampler=own_batches, collate_fn=whole_batch)


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


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer. Returns sums over the images of all ranks."""
    model.train(optimizer is not None)
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
    meet(args)  # guard rail: stops if the ranks have different flags
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    # FSDP's forward() gathers, so all ranks must call it the same number of times, also in a test.
    test_loader = equal_batches(test_loader.dataset, rank, world_size)
    # Equal on all ranks, because each rank keeps a shard of the parameters that it draws.
    torch.manual_seed(args.seed)
    if args.meta:
        # NEW: the parameters get a shape, but no memory, and no random numbers are drawn. So only
        # rank 0 ever has the whole model.
        with torch.device("meta"):
            model = make_model(args)
        shard(model, args)
        fill(model, args, device)
    else:
        model = make_model(args)
        shard(model, args)  # this also moves the shards to the device, layer by layer
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    show_sharding(model, optimizer, *next(iter(train_loader)), args.keep_weights)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    parser.add_argument("--keep_weights", action="store_true", help="free layers in backward()")
    parser.add_argument("--meta", action="store_true", help="only rank 0 makes the whole model")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
