"""Tensor parallelism: every rank has a piece of every layer, and all work on the same images at the same time.

Linear layers are cut in pairs. Columns of the first: each rank computes some of its outputs. Rows of the second: they
take just these, and the pair's output is the sum over all ranks: one all_reduce. In backward() there is one more, where
the pair began: the columns of all ranks add to the gradient of its input (https://arxiv.org/abs/1909.08053). The sum
needs none: its gradient is that of each of its parts.

    input -> rank 0: columns A0, ReLU, rows B0 -> \\
          -> rank 1: columns A1, ReLU, rows B1 ->  + all_reduce -> output, the same on all ranks

    torchrun --standalone --nproc-per-node 2 playground/tensor_parallel.py --compare
    torchrun --standalone --nproc-per-node 2 playground/tensor_parallel.py --compare --by dtensor

Before single_gpu.py's numbers it prints:
    outputs differ from the whole model's by 4e-08, gradients by 4e-09
    all_reduce in forward: 2, in backward: 1  (predicted: 2 and 1, one for each pair of layers, none for images)

Break it, in a copy, with --compare: (1) Leave register_hook(add_up) out. What is still right? (2) Before load(...) seed
with args.seed + rank, by hand and by dtensor; then `order` instead. Who complains? (3) With --by dtensor misspell a key
of the plan (`column + "x": ...`), then both.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS
from measure.steps import compare_step


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


def cut_by_hand(column, row):
    """Keep this rank's piece of a pair of layers, and add up over all ranks where the pair ends and where it begins."""
    for layer, name, dim in (column, "weight", 0), (column, "bias", 0), (row, "weight", 1):  # shape: outputs, inputs
        piece = getattr(layer, name).detach().chunk(dist.get_world_size(), dim)[dist.get_rank()]
        setattr(layer, name, torch.nn.Parameter(piece.clone()))
    if dist.get_rank() > 0:
        row.bias.requires_grad_(False).zero_()  # rank 0 adds it, once

    def add_up(gradient):
        dist.all_reduce(gradient := gradient.clone())  # NEW: in backward: all ranks' columns add to it, in a copy
        return gradient

    def begin(_, inputs):
        if inputs[0].requires_grad:  # images don't
            inputs[0].register_hook(add_up)

    column.register_forward_pre_hook(begin)
    row.register_forward_hook(lambda _, inputs, part: dist.all_reduce(part.detach()))  # NEW: in place, past autograd


def whole(piece, shape):
    """Join the pieces of all ranks, of a weight or of what is shaped like it."""
    if isinstance(piece, DTensor) or piece.shape == shape:
        return piece.full_tensor() if isinstance(piece, DTensor) else piece
    dist.all_gather_object(pieces := [None] * dist.get_world_size(), piece.cpu())
    return torch.cat(pieces, dim=int(piece.shape[0] == shape[0]))


def run_epoch(model, loader, device, optimizer=None):
    """Train, or test without an optimizer. Returns sums over all images: loss, hits, images."""
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
    return loss_sum.item(), hits.item(), seen


def save(args, epoch, model, optimizer, shapes):
    """Join the pieces of all ranks, and let rank 0 write a checkpoint like those of the other lessons."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for i, (name, weight) in enumerate(model.named_parameters()):
        state["model"][name] = whole(weight.detach(), shapes[i])
        moments = state["optimizer"]["state"].get(i, {})
        state["optimizer"]["state"][i] = {k: whole(v, shapes[i]) if v.dim() else v for k, v in moments.items()}
    if dist.get_rank() == 0:
        with open(f"{args.savefile}.tmp", "wb") as file:
            torch.save(state | {"epoch": epoch, "args": vars(args)}, file)
        os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole


@record
def train(args):
    """Compare a step with the whole model's; then train, test and report, one line an epoch."""
    rank, device = join(args)
    meet(args)  # guard rail
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)
    train_set, test_set = load(args.dataset, args.data_dir)
    order = torch.Generator()
    sampler = RandomSampler(train_set, generator=order)  # NEW: all ranks read the same batches
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, **options)
    test_loader = DataLoader(test_set, 1000, **options)
    model = MODELS[args.model](args.width, args.layers)  # NEW: all of it, on the CPU; this rank's pieces move
    shapes = [weight.shape for weight in model.parameters()]
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    for column, row in zip(linear[::2], linear[1::2], strict=False):  # NEW: a last one without a partner stays whole
        if args.by == "hand":
            cut_by_hand(model.get_submodule(column), model.get_submodule(row))
        else:  # NEW: all of that is in PyTorch
            parallelize_module(model, mesh, {column: ColwiseParallel(), row: RowwiseParallel()})
    model = model.to(device)
    if args.compare:
        torch.manual_seed(args.seed)
        compare_step(model, MODELS[args.model](args.width, args.layers), *next(iter(train_loader)))
    alike = len({isinstance(weight, DTensor) for weight in model.parameters()}) == 1  # fused Adam takes no mixture
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=alike)

    for epoch in range(args.epochs):
        order.manual_seed(args.seed + epoch)  # another order in each epoch, the same in each run
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen = run_epoch(model, test_loader, device)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line, flush=True)
        if args.savefile:
            save(args, epoch + 1, model, optimizer, shapes)
    dist.destroy_process_group()


def main():
    """Read the flags and be one of the ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--by", choices=["hand", "dtensor"], default="hand", help="dtensor: tensors that know how they are cut")
    add("--compare", action="store_true", help="first compare a step with the whole model's")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--epochs", type=int, default=3)
    add("--batch_size", type=int, default=128, help="images in a step")
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
    width = args.width or {"mlp": 64, "cnn": 120}[args.model]
    if width % world_size:
        nearest = max(1, round(width / world_size)) * world_size
        parser.error(f"--width {width} can't be shared by {world_size} processes: use --width {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # one rank of a node at a time
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
