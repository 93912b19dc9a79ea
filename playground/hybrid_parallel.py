"""Two kinds of parallelism on a mesh of ranks: tensor parallelism along one axis, FSDP along the other.

    --mesh 2x2      tp 0      tp 1
            dp 0    rank 0    rank 1     a tp group (tensor parallel) has a whole model in pieces, and own images
            dp 1    rank 2    rank 3     a dp group (data parallel), ranks 0 and 2, shares out a piece by fully_shard

Why a tp group stays within a node: in the middle of forward() and backward() its ranks add up activations for each pair
of layers, and the next layer needs the sum. They can only wait, so this takes the fastest links. torchrun numbers the
ranks of a node one after the other: a tp group stays within it if its size divides their number. A dp group gathers
weights while an earlier layer computes, and scatters gradients while the next one does, so slower links will do.

In a ring, with a mesh of d x t ranks, a rank sends in each step:
    tp    2 (t-1)/t x what all pairs put out, and the gradients of what they take in: more for more images
    dp    3 (d-1)/d x the weights of its piece: gathered in forward and in backward, and then their gradients

    torchrun --standalone --nproc-per-node 4 playground/hybrid_parallel.py
    torchrun --standalone --nproc-per-node 4 playground/hybrid_parallel.py --mesh 1x4 --batch_size 1024

After single_gpu.py's numbers it prints who is where, as above, and the messages of a step:
    axis  collective      counted  predicted  bytes from each rank
    tp    all_reduce      3        3          35,328
    dp    all_gather      8        8          118,568
    dp    reduce_scatter  4        4          59,284

Break it, in a copy: (1) Before optimizer.step() write torch.nn.utils.clip_grad_norm_(model.parameters(), 1). Try it
with --model mlp, then cnn. (2) Leave `dp_size, dp_rank, ` out. Who complains? (3) In shard, call fully_shard first.
"""

import argparse
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
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS
from measure.steps import show_axes


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


def shard(model, mesh):
    """Cut the model into pieces along tp, and share out each piece along dp."""
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    for column, row in zip(linear[::2], linear[1::2], strict=False):
        parallelize_module(model, mesh["tp"], {column: ColwiseParallel(), row: RowwiseParallel()})  # NEW: for DTensors
    for layer in (*model.stage1, *model.stage2):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["dp"])  # NEW: it adds its axis to DTensors; parallelize_module could not
    fully_shard(model, mesh=mesh["dp"])
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # it is wary of views, and DTensors' outputs are views


def run_epoch(model, loader, device, dp_group, optimizer=None):
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
        loss_sum += loss.detach().double() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    totals = torch.tensor([loss_sum, hits, seen], dtype=torch.float64, device=device)
    dist.all_reduce(totals, group=dp_group)  # NEW: each image once: a tp group's ranks have the same ones
    return totals.tolist()


def save(args, epoch, model, optimizer):
    """Join the pieces of all ranks, and let rank 0 write a checkpoint like those of the other lessons."""
    weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}  # NEW: from both axes
    state = {"model": weights, "optimizer": optimizer.state_dict()}
    for i, moments in state["optimizer"]["state"].items():
        whole = {name: moments[name].full_tensor() for name in ("exp_avg", "exp_avg_sq")}
        state["optimizer"]["state"][i] = moments | whole
    if dist.get_rank() == 0:
        with open(f"{args.savefile}.tmp", "wb") as file:
            torch.save(state | {"epoch": epoch, "args": vars(args)}, file)
        os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole


@record
def train(args):
    """Train, test and report, one line an epoch; then show who sends what."""
    rank, device = join(args)
    meet(args)  # guard rail
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    shape = tuple(map(int, args.mesh.split("x")))
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))  # NEW: the grid, rank after rank
    dp_group, dp_rank, dp_size = mesh["dp"].get_group(), mesh["dp"].get_local_rank(), mesh["dp"].size()
    # NEW: the ranks of a tp group have the same dp_rank, and read the same images
    sampler = DistributedSampler(train_set, dp_size, dp_rank, seed=args.seed, drop_last=True)
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, args.batch_size // dp_size, sampler=sampler, drop_last=True, **options)
    mine = range(dp_rank, len(test_set), dp_size)  # no padding: each test image counts exactly once
    test_loader = DataLoader(test_set, 1000, sampler=mine, **options)
    model = MODELS[args.model](args.width, args.layers)
    shard(model, mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, device, dp_group, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, device, dp_group)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        if args.savefile:
            save(args, epoch + 1, model, optimizer)
    show_axes(mesh, model, *next(iter(train_loader)))
    dist.destroy_process_group()


def main():
    """Read the flags and be one of the ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--mesh", metavar="DPxTP", help="default: two columns for an even number of ranks, else one")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
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
    meshes = [f"{world_size // tp}x{tp}" for tp in range(1, world_size + 1) if world_size % tp == 0]
    if args.mesh is None:
        args.mesh = f"{world_size // 2}x2" if world_size % 2 == 0 else f"{world_size}x1"
    if args.mesh not in meshes:
        parser.error(f"--mesh {args.mesh} can't hold {world_size} processes: use --mesh {' or '.join(meshes)}")
    (dp, tp), width = map(int, args.mesh.split("x")), args.width or {"mlp": 64, "cnn": 120}[args.model]
    for name, size, ranks, group in ("batch_size", args.batch_size, dp, "dp"), ("width", width, tp, "tp"):
        if size % ranks:
            nearest = max(1, round(size / ranks)) * ranks
            parser.error(f"--{name} {size} can't be shared by {ranks} ranks of a {group} group: use --{name} {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # one rank of a node at a time
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
