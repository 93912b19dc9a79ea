"""Fully sharded data parallelism (FSDP): each rank stores 1/n of every layer.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/sharded/fully_sharded_data_parallel.py

It prints the same numbers as `single_gpu.py`, up to rounding (with `--double` all twelve digits
agree), and then what rank 0 of two holds: 8 bytes for each of 59,210 parameters (with DDP 16):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  12.11 s  4,947 images/s
    rank 0 holds   118,420 bytes of the parameters' shards
    rank 0 holds         0 bytes of whole layers
    rank 0 holds   118,420 bytes of gradients
    rank 0 holds   236,840 bytes of optimizer state

Just before a layer computes, the ranks gather it whole, and afterwards they free it. In
`backward()`, they also average its gradients. `fully_shard(layer)`, also called FSDP2, adds hooks
for this, as `ShardedLayer` in `manual_fully_sharded.py` does. It replaces each parameter with a
DTensor, a tensor that knows which rank has which shard, so the optimizer must be made afterwards.
(Each parameter is split by its rows. One all_gather brings the shards of all parameters of a layer,
which are then copied into whole parameters.) A last call, with the whole model, shards the rest. At
the start, each rank makes the whole model for a moment, with `--meta` only rank 0.

For 7 billion parameters on 8 GPUs, DDP needs 112 GB on each, and FSDP 14, plus the layers that are
computing (`playground/pages/figures/fsdp.svg`). The price is messages: 8 all_gathers in a step, for
four layers in `forward()` and again in `backward()`, and 4 reduce_scatters. In a ring, these take
1.5 times the bytes of DDP's all_reduce, and with gloo about twice as many.

With several nodes, shard within each, and keep replicas between them (hybrid sharding, HSDP). Four
processes on one machine show it:
    torchrun --standalone --nproc-per-node 4 playground/sharded/fully_sharded_data_parallel.py \
        --replicas 2
The ranks form a mesh of two rows. A row has all shards, and a rank keeps as many bytes as with two
ranks. In `backward()`, the ranks of a column, which have the same shard, add up its gradient.

For users of DDP: `forward()` gathers layers by messages, so all ranks must also test, with equally
many batches. Buffers, such as batch norm's, are not sent. `playground/pages/sharding.md` says what
else changes, what replaces the arguments of the older `FullyShardedDataParallel`, and how to shard
a model from Hugging Face.

Try breaking it, in a copy beside it:
  1. Make the optimizer before `shard(model, args)`. How far do the parameters move?
  2. Shard only the whole model: write `layers = []`. Which line of the output changes?
  3. Before `model = ...`, seed with `args.seed + rank`. Which rank's parameters are trained?
  4. With four processes and `watch.py`, write `reshard_after_forward=2`. Which messages change?

Builds on: manual_fully_sharded.py
The next lesson, `fully_sharded_checkpoints.py`, saves and resumes such a run.
"""

import os
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


def shard(model, args):
    """Keep only a shard of every parameter on each rank. A layer gathers them when it computes."""
    # NEW: a mesh arranges the ranks of the process group: by default in a single row. If there are
    # two rows, fully_shard() keeps replicas along the columns, and shards along the rows.
    shape = (args.replicas, dist.get_world_size() // args.replicas)
    mesh = dist.init_device_mesh(args.device, shape, mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():
        # The groups of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
        group.set_timeout(timedelta(seconds=args.timeout))
    if args.replicas == 1:
        mesh = mesh["shard"]  # one axis, because there is nothing to add up along the other
    # NEW: each layer is gathered by one message of its own. (Of a transformer, list the blocks.)
    layers = model.layers
    for layer in layers:
        # Free it after forward(), or keep it until backward().
        fully_shard(layer, mesh=mesh, reshard_after_forward=not args.keep_weights)
    # NEW: last, the whole model takes the rest. (Leave layers that share a table to this call.) By
    # default, the rest stays whole from forward() to backward().
    fully_shard(model, mesh=mesh)
    # NEW: a layer starts to gather the next one before it computes. (On a GPU, Python runs ahead,
    # so messages travel during a computation anyway. This helps if Python is slow.)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


def train(args):
    """Shard a model, train it, and show what rank 0 holds."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    # The same seed on all ranks, because each keeps a shard of the same random numbers.
    torch.manual_seed(args.seed)
    if args.meta:
        model = make_on_rank_0(args, device)
    else:
        model = make_model(args)
        shard(model, args)  # NEW: this also moves the shards to the device, layer by layer
    torch.manual_seed(args.seed + rank)
    # After shard(), because that has replaced the parameters.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    if rank == 0:
        show_bytes(model, optimizer)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def make_on_rank_0(args, device):
    """Return a sharded model. Only rank 0 has ever had memory for all of it."""
    with torch.device("meta"):  # NEW: tensors with a shape, but without memory and numbers
        model = make_model(args)
    shard(model, args)
    # Gives the shards memory. Buffers that are not in state_dict() must be computed again after it.
    model.to_empty(device=device)
    state = make_model(args).state_dict() if dist.get_rank() == 0 else {}
    # NEW: rank 0 sends one parameter after the other, and each rank keeps its shard.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return model


# You can stop here: what follows prints, and reads flags.
def show_bytes(model, optimizer):
    """Print the bytes that rank 0 holds."""
    # NEW: while a layer is whole, its parameters are plain tensors.
    whole = [each for each in model.parameters() if not isinstance(each, DTensor)]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # with --keep_weights, the last test has left the layers whole
    parameters = list(model.parameters())
    state = 0
    for averages in optimizer.state.values():
        state += averages["exp_avg"].to_local().nbytes + averages["exp_avg_sq"].to_local().nbytes
    held = {
        "the parameters' shards": sum(each.to_local().nbytes for each in parameters),
        "whole layers": sum(each.nbytes for each in whole),
        "gradients": sum(each.grad.to_local().nbytes for each in parameters if each.requires_grad),
        "optimizer state": state,
    }
    for name, nbytes in held.items():
        print(f"rank 0 holds {nbytes:>9,} bytes of {name}", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has."""
    keep = "keep gathered layers until backward(): more memory, fewer messages"
    parser.add_argument("--keep_weights", action="store_true", help=keep)
    parser.add_argument("--meta", action="store_true", help="only rank 0 makes the whole model")
    help = "rows of ranks, each of which has the whole model in shards"
    parser.add_argument("--replicas", type=flags.positive, default=1, help=help)


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks."""
    parser.check_batch(args.batch_size, world_size)
    if world_size % args.replicas:
        parser.error(f"{world_size} ranks cannot be {args.replicas} replicas of the same size")


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), fit_epoch(), run_epoch() and main(). If you copy this lesson, copy
# this, too.


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


def run_epoch(model, loader, device, optimizer=None):
    """Train, or with no optimizer, test. Returns sums over all ranks: loss, correct, images."""
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
    dist.all_reduce(sums)
    return sums.tolist()


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.ranks(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)  # an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # only one rank downloads
    train(args)


if __name__ == "__main__":
    main()
