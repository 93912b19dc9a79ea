"""A mesh of ranks: one kind of parallelism along each of its two axes.

A mesh is a grid of ranks, whose axes have names. The ranks on a line along an axis form a process
group. With --kind tp --mesh 2x2, the rows are two tp groups, and the columns are two dp groups:

            tp 0      tp 1
    dp 0    rank 0    rank 1
    dp 1    rank 2    rank 3

--kind tp combines tensor parallelism (tp) with FSDP, which is a kind of data parallelism (dp). The
ranks of a tp group split the linear layers, as in tensor_parallel.py, and process the same images.
The ranks of a dp group have the same part of each layer, and shard it with fully_shard. Of the 64
outputs of the first layer, a rank has the parameters of 32 after splitting, of 16 after sharding.

--kind hsdp shards along one axis and keeps replicas along the other (hybrid sharded data
parallelism). The ranks of a shard group shard the whole model, so each shard group is a replica.
The ranks of a replicate group have the same shards of different replicas, and average their
gradients with an all_reduce.

The ranks of a tp or a shard group are consecutive, and so are those that torchrun starts on a node.
So if their number divides the ranks on a node, these groups lie inside nodes, where the links are
fastest.

Run it:
    torchrun --standalone --nproc-per-node 4 playground/hybrid_parallel.py
    torchrun --standalone --nproc-per-node 4 playground/hybrid_parallel.py --kind hsdp

It prints the same numbers as single_gpu.py, and the messages of one more step. The predictions
follow from the formulas in playground/sharding.md:
    axis       collective      counted  predicted  bytes sent  predicted
    tp         all_reduce      3        3          35,328      35,328
    dp         all_gather      8        8          118,568     118,568
    dp         reduce_scatter  4        4          59,284      59,284
With --kind hsdp it counts:
    shard      all_gather      8        8          236,840     236,840
    shard      reduce_scatter  4        4          118,420     118,420
    replicate  all_reduce      4        4          118,420     118,420

Try breaking it, in a copy (cp playground/hybrid_parallel.py playground/broken.py):
  1. Before `optimizer.step()`, write `torch.nn.utils.clip_grad_norm_(model.parameters(), 1)`. Does
     it work with --model mlp, and with --model cnn?
  2. Write `set_epoch(epoch + rank)`. Which ranks must read the same images? Is there an error?
  3. Call `shard(model, mesh["dp"])` before `split(model, mesh["tp"])`. Is there an error?

The next lesson, mixed_precision.py, computes in 16 bits.
"""

import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import equal_batches, fetch, loaders
from common.guard_rails import check, explained
from common.models import WIDTH, make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.steps import show_axes


def split(model, mesh):
    """Split the pairs of linear layers over the ranks of a tp group, as tensor_parallel.py does."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    plan = {}
    for first, second in zip(linear[::2], linear[1::2], strict=False):
        plan[first] = ColwiseParallel()
        plan[second] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    # PyTorch 2.15 warns that the outputs of layers are views, which must not be changed in place.
    # No function of this lesson changes them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")


def shard(model, mesh):
    """Shard the parameters of each layer over a mesh of one axis, or replicate and shard over two.

    fully_sharded_data_parallel.py explains why the model itself comes last.
    """
    for layer in (*model.stage1, *model.stage2):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


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


def run_epoch(model, loader, device, dp_group, optimizer=None):
    """Train, or only test if there is no optimizer. Returns sums over all images."""
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
    dist.all_reduce(sums, group=dp_group)  # NEW: the ranks of a tp group have the same images
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch. Then show the messages of a step."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    outer, inner = map(int, args.mesh.split("x"))
    torch.manual_seed(args.seed)
    model = make_model(args)
    if args.kind == "tp":
        # NEW: the first tp group has the ranks 0, 1, ..., and the next one those after them
        mesh = dist.init_device_mesh(device.type, (outer, inner), mesh_dim_names=("dp", "tp"))
        dp_group = mesh["dp"].get_group()
        dp_rank = mesh["dp"].get_local_rank()
        dp_size = outer
        split(model, mesh["tp"])
        # NEW: shard() comes second, because fully_shard() accepts what is split, but
        # parallelize_module() does not accept shards.
        shard(model, mesh["dp"])
    else:
        names = ("replicate", "shard")
        mesh = dist.init_device_mesh(device.type, (outer, inner), mesh_dim_names=names)
        dp_group = None  # all ranks
        dp_rank = rank
        dp_size = outer * inner
        shard(model, mesh)  # NEW: with two axes, fully_shard replicates over the first one
    for group in mesh.get_all_groups():
        # NEW: the groups of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL)
        group.set_timeout(timedelta(seconds=args.timeout))
    torch.manual_seed(args.seed + dp_rank)
    # NEW: the ranks of a tp group have the same dp_rank, so they read the same images
    train_loader, test_loader = loaders(args, dp_rank, dp_size)
    # FSDP's forward() gathers, so all ranks must call it the same number of times, also in a test.
    test_loader = equal_batches(test_loader.dataset, dp_rank, dp_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, dp_group, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device, dp_group)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    show_axes(mesh, model, *next(iter(train_loader)))
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    add = parser.add_argument
    add("--kind", choices=["tp", "hsdp"], default="tp", help="what the axes of the mesh are")
    add("--mesh", help="sizes of the axes, as in 2x2; default: if possible, 2 for the second axis")
    args = parser.parse_args()
    check(parser, args, replicas=1)  # guard rail: refuses impossible flags
    if args.kind == "tp" and args.model == "transformer":
        parser.error("--model transformer: three_axes.py splits it; here use --model mlp")
    world_size = int(os.environ["WORLD_SIZE"])
    meshes = []
    for inner in range(1, world_size + 1):
        if world_size % inner == 0:
            meshes.append(f"{world_size // inner}x{inner}")
    if args.mesh is None:
        args.mesh = f"{world_size // 2}x2" if world_size % 2 == 0 else f"{world_size}x1"
    if args.mesh not in meshes:
        wrong = f"--mesh {args.mesh} does not have {world_size} processes"
        parser.error(f"{wrong}: use --mesh {' or '.join(meshes)}")
    outer, inner = map(int, args.mesh.split("x"))
    width = args.width or WIDTH[args.model]
    if args.kind == "tp" and width % inner:
        nearest = max(1, round(width / inner)) * inner
        wrong = f"--width {width} cannot be divided by the {inner} ranks of a tp group"
        parser.error(f"{wrong}: use --width {nearest}")
    dp_size, parts = (outer, "tp groups") if args.kind == "tp" else (world_size, "ranks")
    if args.batch_size % dp_size:
        nearest = max(1, round(args.batch_size / dp_size)) * dp_size
        wrong = f"--batch_size {args.batch_size} cannot be divided by the {dp_size} {parts}"
        parser.error(f"{wrong}: use --batch_size {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
