"""Fully sharded data parallelism (FSDP): each rank keeps a share of all weights, gradients and Adam's state.

Before a layer computes, the ranks gather its weights (all_gather), and free them right after. backward() gathers them
again, a layer ahead (GPUs always do), and leaves each rank the mean gradient of its share (reduce_scatter). So up to
two layers are whole. It sends 1.5 times DDP's bytes, or as many with --keep_weights, which frees none until backward().

    torchrun --standalone --nproc-per-node 2 playground/fully_sharded_data_parallel.py --run_dir runs/fsdp -s runs/f.pt
    torchrun --standalone --nproc-per-node 4 playground/fully_sharded_data_parallel.py --run_dir runs/fsdp --epochs 5

It prints single_gpu.py's lines (others with --clip 1), then what it counts in one more step:
    bytes   weights    gradients  Adam       together   gathered while layer 1 computes, layer 2, ...
    rank 0  118,420    118,420    236,872    473,712    200,960    16,640     16,640     2,600
    DDP     236,840    236,840    473,680    947,360
    messages of a step: 8 all_gather, 4 reduce_scatter, 0 all_reduce. DDP: an all_reduce for each 25 MB of gradients

Break it, in a copy: (1) make the optimizer before shard(). How far do weights move? (2) Don't shard layers, only the
model. What is gathered? (3) Write torch.manual_seed(args.seed + rank) before the model. Whose weights are trained?
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATA_DIR, fetch, load, whole_batch
from common.guard_rails import check, explained, meet
from common.models import MODELS
from measure.shards import show_sharding


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


def newest_checkpoint(args, model, optimizer):
    """Go on from the newest checkpoint, whatever number of ranks wrote it. Returns how many epochs are done."""
    if not (found := sorted(path.parent for path in Path(args.run_dir).glob("epoch-*/.metadata"))):  # it comes last
        return 0
    weights, moments = get_state_dict(model, optimizer)  # not in a new run: it makes Adam count a step
    state = {"model": weights, "optimizer": moments, "epoch": 0, "args": dict(vars(args))}
    try:
        dcp.load(state, checkpoint_id=found[-1])  # NEW: each rank reads its rows, whoever wrote them
        then, names = state["args"], ("dataset", "batch_size", "lr", "seed", "double")
        wrong = [f"it was trained with --{name} {then[name]}" for name in names if then[name] != vars(args)[name]]
    except dcp.CheckpointException as error:
        wrong = [(str(reason) or repr(reason)).splitlines()[0].rstrip(".") for reason, _ in error.failures.values()]
    if wrong:
        sys.exit(1 if dist.get_rank() else f"error: {found[-1]}: {wrong[0]}: use its flags, or delete it if damaged")
    if dist.get_rank() == 0:
        print(f"{found[-1]}: {state['epoch']} of {args.epochs} epochs are done", flush=True)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["epoch"]


def shard(model, args):
    """Leave each rank its rows of each layer's weights; forward() and backward() gather them when they need them."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))  # NEW: all ranks, in a row
    narrow, wide = torch.bfloat16 if args.precision == "bf16" else None, torch.get_default_dtype()
    policy = MixedPrecisionPolicy(narrow, wide)  # NEW: to gather and compute in, to average gradients in
    for layer in (*model.stage1, *model.stage2):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=not args.keep_weights)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=wide))  # NEW: the root, last


def run_epoch(model, loader, device, optimizer=None, clip=0.0):
    """Train, or test without an optimizer. Returns sums over the images of all ranks: loss, hits, images, norms."""
    model.train(optimizer is not None)
    loss_sum = hits = seen = norm_sum = 0
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            if clip:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)  # NEW: of all ranks' shards together
                norm_sum += norm.full_tensor() * len(labels)  # NEW: it is a DTensor as well
            optimizer.step()
        loss_sum += loss.detach().double() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    totals = torch.tensor([loss_sum, hits, seen, norm_sum], dtype=torch.float64, device=device)
    dist.all_reduce(totals)
    return totals.tolist()


@record
def train(args):
    """Train, test and report, one line an epoch; then show what each rank holds and sends."""
    rank, device = join(args)
    meet(args)  # guard rail
    world_size = dist.get_world_size()
    torch.set_default_dtype(torch.float64 if args.double else torch.float32)  # of weights and images
    torch.manual_seed(args.seed)  # NEW: equal on all ranks: each keeps rows of the weights that it has drawn
    train_set, test_set = load(args.dataset, args.data_dir)
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    share = args.batch_size // world_size
    options = {"collate_fn": whole_batch, "pin_memory": device.type == "cuda"}  # pinned: a GPU reads it by itself
    train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, **options)
    mine = range(rank, len(test_set), world_size)  # no padding: each test image counts exactly once
    test_loader = DataLoader(test_set, 1000, sampler=mine, **options)
    model = MODELS[args.model](args.width, args.layers, **({"dropout": args.dropout} if args.dropout else {}))
    shard(model, args)  # NEW: moves layer after layer to the device, where all of them together need not fit
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)  # NEW: after shard, of shards
    done = newest_checkpoint(args, model, optimizer) if args.run_dir else 0

    for epoch in range(done, args.epochs):
        sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
        torch.manual_seed(args.seed + epoch * world_size + rank)  # NEW: different: each drops out other neurons
        start = time.perf_counter()
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
        loss, hits, seen, norm = run_epoch(model, bar, device, optimizer, args.clip)
        seconds = time.perf_counter() - start
        _, test_hits, test_seen, _ = run_epoch(model, test_loader, device)
        if rank == 0:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
            line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
            print(line + (f"  norm {norm / seen:.4f}" if args.clip else ""), flush=True)
        if args.run_dir:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "epoch": epoch + 1, "args": vars(args)}
            dcp.save(state, checkpoint_id=f"{args.run_dir}/epoch-{epoch + 1:04}")  # NEW: each rank writes its shards
    if args.savefile:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)  # NEW: all ranks gather it, rank 0 keeps it
        weights, moments = get_state_dict(model, optimizer, options=whole)
        state = {"model": weights, "optimizer": moments, "epoch": max(done, args.epochs), "args": vars(args)}
        if rank == 0:
            with open(f"{args.savefile}.tmp", "wb") as file:
                torch.save(state, file)
            os.replace(f"{args.savefile}.tmp", args.savefile)  # a crash on the way leaves the last one whole
    show_sharding(model, optimizer, *next(iter(train_loader)))
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
    add("--clip", type=float, default=0.0, help="shorten gradients that are longer than this; 0: don't")
    add("--model", choices=MODELS, default="mlp")
    add("--width", type=int, help="neurons in each hidden layer; default: 64 (mlp), 120 (cnn)")
    add("--layers", type=int, help="hidden layers, the linear ones in cnn; default: 3 (mlp), 1 (cnn)")
    add("--dropout", type=float, default=0.0, help="share of the hidden layer that is switched off (cnn)")
    add("--dataset", choices=["mnist", "digits"], help="default: mnist, or digits where it can't be had")
    add("--data_dir", default=DATA_DIR, help="default: data/ beside playground/")
    add("--seed", type=int, default=0)
    add("--double", action="store_true", help="float64: no rounding to be seen between the lessons")
    add("--precision", choices=["bf16"], help="compute in bfloat16; shards, mean gradients and Adam keep their type")
    add("--keep_weights", action="store_true", help="from forward to backward: fewer messages, more memory")
    add("--run_dir", help="folder for sharded checkpoints, one an epoch; goes on from the newest")
    add("-s", "--savefile", help="write a checkpoint here at the end, of the form that all lessons load")
    args = parser.parse_args()
    check(parser, args)  # guard rail
    world_size = int(os.environ["WORLD_SIZE"])
    if args.batch_size % world_size:
        nearest = max(1, round(args.batch_size / world_size)) * world_size
        parser.error(f"--batch_size {args.batch_size} can't be shared by {world_size} processes: use {nearest}")
    if not 0 <= args.dropout < 1 or (args.dropout and args.model != "cnn"):
        parser.error(f"--dropout {args.dropout}: must be from 0 to below 1, and needs --model cnn")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # one rank of a node at a time
    train(args)


if __name__ == "__main__":
    with explained():  # guard rail
        main()
