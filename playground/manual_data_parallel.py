"""Data parallelism by hand: every rank has a copy of the model and a share of each batch; the gradients are averaged.

Three things make several processes train as one does. They start from the same weights: rank 0 sends its own to the
others. Each takes another share of the same batch: the sampler sees to that. And before each step they average their
gradients, so that all take the same step and the copies never part. DistributedDataParallel does the same, faster.

    python playground/manual_data_parallel.py -g 2              # two processes
    python playground/manual_data_parallel.py --weights send    # rank 0 sends to one rank after the other
    python playground/manual_data_parallel.py --bucket          # one all_reduce a step, not one for each weight
    python playground/manual_data_parallel.py -n 2 -g 2 -nr 0 -ip <ip of node 0>    # and on node 1 with -nr 1

Any number that divides --batch_size gives single_gpu.py's numbers, up to rounding (pid, host and times will differ):

    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.53 s  39,213 images/s

Break it, in a copy:
  1. Comment out `send_weights(...)`: the ranks start from different weights; compare the losses.
  2. Comment out `average_gradients(...)`: each rank trains a model of its own, on its share; compare the losses.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # C++ back traces would bury the line that helps
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import fetch, load, whole_batch
from common.flags import flags, parse
from common.guard_rails import deadline, explain, sign_in
from common.models import MODELS
from common.profiling import profiled


def join(local_rank, args):
    """Meet the other ranks, form the process group, print who is who. Returns this process's rank and its device."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a rank at once, even one that waits for others
    rank = args.nr * args.gpus + local_rank
    local_rank = int(os.environ.get("LOCAL_RANK", local_rank))
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    gpu = device if args.device == "cuda" else None
    if gpu:
        torch.cuda.set_device(gpu)  # else every rank would also use GPU 0
    wait = timedelta(seconds=args.timeout)
    with deadline(args, "reach node 0"):
        if args.meeting_file:  # the rendezvous is a dictionary in a file, or one that node 0 keeps
            store = dist.FileStore(args.meeting_file)
        else:
            store = dist.TCPStore(args.ip, args.port, timeout=wait, wait_for_workers=False)
    everyone = sign_in(store, rank, local_rank, device, args)
    with deadline(args, "connect to all other ranks"):
        world = {"rank": rank, "world_size": args.world_size, "device_id": gpu}  # with a GPU, NCCL connects now
        dist.init_process_group(args.backend, store=store, timeout=wait, **world)
    ranks_here = [host for *_, host in everyone].count(os.uname().nodename)
    torch.set_num_threads(max(1, torch.get_num_threads() // ranks_here))  # they share the cores
    return rank, device


def send_weights(model, args):
    """Give all ranks the weights of rank 0."""
    for weight in model.state_dict().values():
        if args.weights == "broadcast":
            dist.broadcast(weight, src=0)  # to all at once; the backend picks the route
        elif dist.get_rank() > 0:
            dist.recv(weight, src=0)
        else:
            for other in range(1, args.world_size):  # blocking: each rank waits for those before it
                dist.send(weight, dst=other)


def average_gradients(model, args):
    """Replace each gradient by its mean over the ranks, which is the gradient of the global batch."""
    gradients = [weight.grad for weight in model.parameters()]
    if args.bucket:  # one long message takes less time than many short ones
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(bucket)
        parts = (bucket / args.world_size).split([gradient.numel() for gradient in gradients])
        for weight, part in zip(model.parameters(), parts, strict=True):
            weight.grad = part.view_as(weight)  # a view into the bucket: nothing is copied back
    else:
        for gradient in gradients:
            dist.all_reduce(gradient)  # each rank gets the sum over all ranks, in place
            gradient /= args.world_size


def run_epoch(model, loader, device, args, optimizer=None):
    """Train, or test without an optimizer, on each batch. Returns the sums of loss, hits, images, float64 (3,)."""
    model.train(optimizer is not None)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # read once an epoch: that waits for the GPU
    loss_sum, hits, seen = totals  # views: what is added to them is added to totals
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        with torch.set_grad_enabled(optimizer is not None):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            average_gradients(model, args)  # NEW: the step that one process with the whole batch would take
            optimizer.step()
        loss_sum += loss.detach() * len(labels)
        hits += (logits.argmax(dim=1) == labels).sum()
        seen += len(labels)
    dist.all_reduce(totals)  # NEW: over all ranks, once an epoch
    return totals


def train(local_rank, args):
    """Train, test and report, one line an epoch."""
    rank, device = join(local_rank, args)
    try:
        train_set, test_set = load(args.dataset, args.data_dir)
        # NEW: of W ranks, rank r takes positions r, r + W, r + 2W, ... of one order: all k-th batches make up one
        sampler = DistributedSampler(train_set, args.world_size, rank, seed=args.seed, drop_last=True)
        share = args.batch_size // args.world_size  # NEW
        train_loader = DataLoader(train_set, share, sampler=sampler, drop_last=True, collate_fn=whole_batch)
        mine = range(rank, len(test_set), args.world_size)  # NEW: no padding, each test image counts exactly once
        test_loader = DataLoader(test_set, 1000, sampler=mine, collate_fn=whole_batch)
        torch.manual_seed(args.seed + rank)  # NEW: so that you see send_weights at work
        model = MODELS[args.model](args.width, args.layers).to(device)
        send_weights(model, args)  # NEW: from here on all ranks have the same model
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)  # 1e-8 makes steps of rounding errors

        for epoch in range(args.epochs):
            sampler.set_epoch(epoch)  # NEW: another order in each epoch, the same on all ranks and in each run
            start = time.perf_counter()
            bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
            steps = profiled(bar, args.profile)
            loss, hits, seen = run_epoch(model, steps, device, args, optimizer).tolist()
            seconds = time.perf_counter() - start
            _, test_hits, test_seen = run_epoch(model, test_loader, device, args).tolist()
            if rank == 0:  # NEW: one line, not one from each rank
                line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
                line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
                print(line, flush=True)
            if rank == 0 and args.savefile:  # under another name first: a crash on the way leaves the last one whole
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                with open(f"{args.savefile}.tmp", "wb") as file:
                    torch.save(state | {"epoch": epoch + 1, "args": vars(args)}, file)
                os.replace(f"{args.savefile}.tmp", args.savefile)
        dist.barrier()  # leave together
    finally:
        dist.destroy_process_group()
    os._exit(0)  # not through Python's shutdown, during which a thread of gloo may abort


def main():
    """Start the ranks of this node and wait for them. One that fails ends them all, with one line."""
    parser = flags(__doc__)
    parser.add_argument("--weights", choices=["broadcast", "send"], default="broadcast", help="how they are given out")
    parser.add_argument("--bucket", action="store_true", help="average all gradients in one all_reduce")
    args, ranks = parse(parser), None
    try:
        args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # once per node, before its ranks start
        if args.nr == 0 and not args.meeting_file:  # on all addresses of this node, at a free port if --port is 0
            store = dist.TCPStore("127.0.0.1", args.port, is_master=True, wait_for_workers=False)
            args.port = store.port
        if "RANK" in os.environ:
            return train(0, args)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks inherit it: until join() only we heed Ctrl-C
        ranks = mp.spawn(train, (args,), args.gpus, join=False)  # train(0, args), train(1, args), ... in new processes
        signal.signal(signal.SIGINT, signal.default_int_handler)
        while not ranks.join():  # True when all have ended; raises if one has failed
            pass
        if args.nr == 0 and args.meeting_file:
            Path(args.meeting_file).unlink()  # the next run must not meet in it
    except (Exception, KeyboardInterrupt) as error:
        return explain(error, args, ranks)
    finally:
        for process in ranks.processes if ranks else ():
            process.kill()


if __name__ == "__main__":
    sys.exit(main())
