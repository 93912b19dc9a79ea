"""The easy way: torchrun starts the ranks, restarts them when one dies, and the lesson goes on where it was.

torchrun comes with PyTorch. On each node it starts the processes and tells them by environment variables who they are
(RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT): this lesson spawns nothing. When one dies, it ends the others
and starts all again (--max-restarts). So rank 0 keeps a run folder, with a log, TensorBoard's curves and checkpoints.

    python playground/distributed_data_parallel_torchrun.py    # one process, without torchrun
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 playground/distributed_data_parallel_torchrun.py
    NODE0=<ip of node 0> RESTARTS=3 run/torchrun_node.sh playground/distributed_data_parallel_torchrun.py    # on each
    torchrun --standalone --nproc-per-node 3 playground/distributed_data_parallel_torchrun.py --gpu_ids 1,6,3 \\
        --batch_size 126 --model resnet18 --dataset cifar10 --pretrained --accumulate 4    # tensorboard --logdir runs

It prints who is who, and single_gpu.py's numbers. When you start it again with more --epochs, it adds the new ones:

    runs/mlp-mnist: 3 of 5 epochs are done (--run_dir: start another run)
    epoch 4/5  loss 0.0968  train 96.97%  test 96.65%  1.49 s  40,152 images/s

Break it, in a copy:
  1. Kill a rank, by its pid in the table: with --max-restarts 3 the last lines are those of a run without the kill.
  2. Leave the optimizer out of what is loaded: after a restart the losses are others. Why?
  3. Leave no_sync() out: the numbers stay. What does it save? Compare the seconds with --accumulate 8.
"""

import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # C++ back traces would bury the line that helps
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import DATASETS, fetch, load, whole_batch
from common.flags import flags, parse
from common.guard_rails import deadline, explain, go_on_with, introduce
from common.models import MODELS, resnet18
from common.profiling import profiled


def join(args):
    """Form the process group, print who is who. Returns this process's rank and its device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))  # NEW: torchrun's environment says all there is to know
    gpu = torch.device("cuda", args.gpu_ids[local_rank]) if args.device == "cuda" else None
    device = gpu or torch.device("cpu")
    if gpu:
        torch.cuda.set_device(gpu)  # else every rank would also use GPU 0
    store, wait = dist.HashStore(), timedelta(seconds=args.timeout)  # NEW: to meet oneself, without torchrun
    with deadline(args, "reach node 0"):
        if "RANK" in os.environ:
            store, *_ = next(dist.rendezvous("env://", timeout=wait))  # NEW: torchrun keeps a store for us
            if os.environ.get("GROUP_WORLD_SIZE") == "1":  # it outlives a restart: begin afresh in it
                store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        world = {"rank": args.nr, "world_size": args.world_size, "device_id": gpu}
        dist.init_process_group(args.backend, store=store, timeout=wait, **world)
    me = (os.environ.get("GROUP_RANK", 0), args.nr, local_rank, str(device), os.getpid(), os.uname().nodename)
    dist.all_gather_object(everyone := [None] * args.world_size, (vars(args), me))
    introduce(everyone, args.nr)
    return args.nr, device


def log(args, line):
    """Print a line and add it to the run folder's log."""
    print(line, flush=True)
    with open(f"{args.run_dir}/log.txt", "a") as file:
        print(line, file=file)


def save(args, epoch, model, optimizer):
    """Write a checkpoint, under another name first: a crash or a full disk leaves the ones before it whole."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "args": vars(args)}
    with open(f"{args.run_dir}/unfinished.pt", "wb") as file:
        torch.save(state, file)
        os.fsync(file.fileno())  # before it gets its name: the machine may die, too
    os.replace(f"{args.run_dir}/unfinished.pt", f"{args.run_dir}/epoch-{epoch:04}.pt")
    for old in sorted(Path(args.run_dir).glob("epoch-*.pt"))[:-3]:
        old.unlink()


def newest_checkpoint(args):
    """Return the last checkpoint, or the one before it if that is damaged, and so on; None if there has been none."""
    paths = sorted(Path(args.run_dir).glob("epoch-*.pt"))
    while paths:
        try:
            state = torch.load(path := paths.pop(), map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError) as error:
            if not paths:
                sys.exit(f"error: {path} is damaged, and there is none before it: choose another --run_dir")
            log(args, f"WARNING: {path} is damaged ({type(error).__name__}): using the one before it")
            continue
        go_on_with(path, state["args"], args)
        log(args, f"{args.run_dir}: {state['epoch']} of {args.epochs} epochs are done (--run_dir: start another run)")
        return state


def run_epoch(model, loader, device, optimizer=None, accumulate=1):
    """Train, or test without an optimizer, on each batch. Returns the sums of loss, hits, images, float64 (3,)."""
    model.train(optimizer is not None)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # read once an epoch: that waits for the GPU
    loss_sum, hits, seen = totals  # views: what is added to them is added to totals
    for batch in loader:
        if optimizer:
            optimizer.zero_grad()
        pieces = list(zip(*(tensor.to(device).chunk(accumulate) for tensor in batch), strict=True))
        for number, (images, labels) in enumerate(pieces, start=1):
            quietly = model.no_sync() if number < len(pieces) else nullcontext()  # NEW: average once, with the last
            with quietly, torch.set_grad_enabled(optimizer is not None):  # forward, too: DDP prepares there
                logits = model(images)
                loss = F.cross_entropy(logits, labels)
                if optimizer:
                    (loss * len(labels) / len(batch[1])).backward()  # NEW: a mean over the batch, not over the piece
            loss_sum += loss.detach() * len(labels)
            hits += (logits.argmax(dim=1) == labels).sum()
            seen += len(labels)
        if optimizer:
            optimizer.step()
    dist.all_reduce(totals)
    return totals


@record  # NEW: torchrun's own report then shows the traceback of the rank that failed first
def train(args):
    """Train, test and report, one line an epoch; go on from the last checkpoint."""
    rank, device = join(args)
    try:
        torch.manual_seed(args.seed)
        train_set, test_set = load(args.dataset, args.data_dir)
        sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
        share = args.batch_size // args.world_size
        train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, collate_fn=whole_batch)
        mine = range(rank, len(test_set), args.world_size)  # no padding: each test image counts exactly once
        test_loader = DataLoader(test_set, 1000, sampler=mine, collate_fn=whole_batch)
        size = (args.width, args.layers)
        plain = resnet18(args.pretrained and rank == 0) if args.model == "resnet18" else MODELS[args.model](*size)
        model = DistributedDataParallel(plain.to(device))  # gives all ranks rank 0's weights
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)  # 1e-8 makes steps of rounding errors
        found = [newest_checkpoint(args) if rank == 0 else None]
        dist.broadcast_object_list(found, device=device)  # NEW: one reads, all get the same
        if found[0]:
            plain.load_state_dict(found[0]["model"])
            optimizer.load_state_dict(found[0]["optimizer"])
        done = found[0]["epoch"] if found[0] else 0  # NEW: the sampler makes each epoch's order from its number
        curves = SummaryWriter(args.run_dir, purge_step=done + 1) if rank == 0 else None

        for epoch in range(done, args.epochs):
            sampler.set_epoch(epoch)  # another order in each epoch, the same in each run
            start = time.perf_counter()
            bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
            steps = profiled(bar, args.profile)
            loss, hits, seen = run_epoch(model, steps, device, optimizer, args.accumulate).tolist()
            seconds = time.perf_counter() - start
            for buffer in plain.buffers():  # NEW: batch norm's averages are each rank's own: test with those we save
                dist.broadcast(buffer, src=0)
            _, test_hits, test_seen = run_epoch(plain, test_loader, device).tolist()
            if rank == 0:
                line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
                line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
                log(args, line)
                curves.add_scalar("loss", loss / seen, epoch + 1)
                curves.add_scalar("accuracy/train", hits / seen, epoch + 1)
                curves.add_scalar("accuracy/test", test_hits / test_seen, epoch + 1)
                curves.add_scalar("images per second", seen / seconds, epoch + 1)
                curves.flush()
                save(args, epoch + 1, plain, optimizer)
        dist.barrier()  # leave together
    finally:
        dist.destroy_process_group()
    os._exit(0)  # not through Python's shutdown, during which a thread of gloo may abort


def main():
    """Join the ranks that torchrun has started. A failure ends in one line, and torchrun ends the other ranks."""
    parser = flags(__doc__, spawns=False)
    add = parser.add_argument
    add("--model", choices=[*MODELS, "resnet18"], default="mlp")
    add("--dataset", choices=DATASETS, help="default: mnist, or digits where it can't be had")
    add("--pretrained", action="store_true", help="start with ImageNet weights (a slow download: raise --timeout)")
    add("--accumulate", type=int, default=1, help="compute a batch in so many pieces, which saves memory")
    add("--gpu_ids", type=lambda text: [int(gpu) for gpu in text.split(",")], help="GPUs of this node, as in 1,6,3")
    add("--run_dir", help="folder for log, curves and checkpoints; default: runs/<model>-<dataset>")
    args = parse(parser, spawns=False)
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
        args.run_dir = args.run_dir or f"runs/{args.model}-{args.dataset}"
        train(args)
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, args)


if __name__ == "__main__":
    sys.exit(main())
