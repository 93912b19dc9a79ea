"""Two kinds of parallelism at once, along the two axes of a mesh of ranks.

Run it, with tensor parallelism and FSDP:
    torchrun --standalone --nproc-per-node 4 playground/split/hybrid_parallel.py

It prints the same numbers as `single_gpu.py`, up to rounding (with `--double` all twelve digits
agree). Each rank keeps half of what it keeps in `tensor_parallel.py`:
    rank 0  dp 0  tp 0  keeps 14,821 parameters
    rank 1  dp 0  tp 1  keeps 14,821 parameters
    rank 2  dp 1  tp 0  keeps 14,821 parameters
    rank 3  dp 1  tp 1  keeps 14,821 parameters

A mesh is a grid of ranks. Its axes have names, and each row and each column is a process group:

               tp 0     tp 1
      dp 0    rank 0   rank 1    A row is a tp group: it reads the same images, and splits layers.
      dp 1    rank 2   rank 3    A column is a dp group: its ranks read different images, and FSDP,
                                 a kind of data parallelism, shards what splitting has left.

Of the first layer's 64 outputs, a rank keeps the parameters of 32 after splitting, and of 16 after
sharding. Every layer waits for messages along a row, so rows should lie inside nodes. They do if a
node has as many ranks as a row, or a multiple. `playground/pages/figures/mesh.svg` shows what is
sent along each axis.

Try breaking it, in a copy beside it:
  1. Before `optimizer.step()`, write `torch.nn.utils.clip_grad_norm_(model.parameters(), 1)`. Does
     it work with `--model mlp`, and with `--model cnn`?
  2. In `fit_epoch()`, write `set_epoch(epoch + rank)`. Which ranks must read the same images?
  3. Call `shard(model, mesh["dp"])` before `split(model, mesh["tp"])`. Is there an error?
Now repair `clipped_matrices.py` in `playground/museum/`.
Builds on: tensor_parallel.py
This is the last lesson of this part. The next part begins with `mixed_precision.py`.
"""

import math
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
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


def split(model, mesh):
    """Split pairs of linear layers over a tp group. This finds those of the MLP and the CNN."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    plan = {}  # for your own model, list the pairs: see find_pairs() in tensor_parallel.py
    for first, second in zip(linear[::2], linear[1::2], strict=False):
        plan[first] = ColwiseParallel()
        plan[second] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    # PyTorch 2.15 warns not to change a layer's output in place. This lesson does not.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")


def shard(model, mesh):
    """Shard the layers over a mesh of one axis."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the whole model, last


def train(args):
    """Make a mesh, split and shard a model on it, train it, and show what each rank keeps."""
    _, device = join(args)
    # NEW: the first row of the mesh has the ranks 0, 1, ..., and the next row those after them.
    mesh = dist.init_device_mesh(args.device, args.mesh, mesh_dim_names=("dp", "tp"))
    for group in mesh.get_all_groups():
        # The groups of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
        group.set_timeout(timedelta(seconds=args.timeout))
    torch.manual_seed(args.seed)  # the same on all ranks, because each keeps a shard of one model
    model = make_model(args)
    # NEW: in this order, because `parallelize_module` does not take layers that are sharded, but
    # `fully_shard` takes layers that are split.
    split(model, mesh["tp"])
    shard(model, mesh["dp"])
    # NEW: the ranks of a tp group have the same dp_rank, so they read the same images. Then
    # run_epoch() counts each image once for each of these ranks, which does not change the mean.
    dp_rank = mesh["dp"].get_local_rank()
    train_loader, test_loader = loaders(args, dp_rank, mesh["dp"].size())
    torch.manual_seed(args.seed + dp_rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    show_mesh(model, mesh)
    dist.barrier()  # DTensor keeps the groups, and without this Python may abort at exit
    dist.destroy_process_group()


# You can stop here: what follows only prints, and reads and checks the flags.


def show_mesh(model, mesh):
    """Print the place of each rank in the mesh, and the number of parameters that it keeps."""
    places = []
    for name, index in zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True):
        places.append(f"{name} {index}")
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    row = f"rank {dist.get_rank()}  {'  '.join(places)}  keeps {kept:,} parameters"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def add_flags(parser):
    """Add the flag that only this lesson has."""
    help = "sizes of its axes, as in 2x2; default: if possible, 2 columns"
    parser.add_argument("--mesh", type=sizes, help=help)


def sizes(text):
    """Parse the sizes of the two axes of a mesh, such as 2x4."""
    rows, columns = map(flags.positive, text.split("x"))
    return rows, columns


def check_flags(parser, args, world_size):
    """Refuse a mesh of another size, and what its groups cannot divide. Choose a mesh."""
    if args.model not in ("mlp", "cnn"):
        parser.error(f"head_parallel.py splits --model {args.model}: use mlp or cnn here")
    if args.mesh is None:
        columns = 1 if world_size % 2 else 2
        args.mesh = (world_size // columns, columns)
    rows, columns = args.mesh
    if math.prod(args.mesh) != world_size:
        parser.error(f"--mesh {rows}x{columns} needs {rows * columns} ranks, not {world_size}")
    if args.width % columns:
        near = max(1, round(args.width / columns)) * columns
        parser.error(f"a tp group of {columns} cannot split --width {args.width}: use {near}")
    parser.check_batch(args.batch_size, rows)


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
