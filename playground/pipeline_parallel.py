"""Pipeline parallelism: a process for each part of the model, and a batch that flows through them in pieces.

Each rank has stages of its own, gets activations from the rank before it and sends its own to the next; the gradients
come back the same way. torch.distributed.pipelining does it; a schedule says when a rank works on which micro-batch:

    GPipe                    all forward passes, then all backward passes (arXiv 1811.06965)
    1F1B                     backward as early as possible: activations of p micro-batches are kept, not of all m
    Interleaved1F1B          two stages on each rank: shorter waits, twice as many messages (arXiv 2104.04473)
    InterleavedZeroBubble    as well, a rank computes gradients of weights while it would wait (arXiv 2401.10241)

With p ranks and m micro-batches, (p-1)/(m+p-1) of the time is a bubble in the first two: a rank waits for its first
input or the others' last. After training the lesson measures it, and the same step with the batch in one piece:

    python playground/pipeline_parallel.py -g 2 --width 512 --layers 8 --batch_size 2048 --plot timeline.png
    python playground/pipeline_parallel.py -n 2 -g 1 -nr 0 -ip <ip of node 0> --schedule 1F1B    # and -nr 1 there

It prints single_gpu.py's numbers, and who computes when (a digit: forward, a letter: backward, a dot: waiting):
    rank 0 |000111222333444555666777......aaabbbcccdddeeefffggghhh|
    rank 1 |...000111222333444555666777aaabbbcccdddeeefffggghhh...|

Break it, in a copy:
  1. Use --micro_batches 2, 4, 16, 64: the bubble shrinks as the formula says. Why does the step not get ever faster?
  2. Leave `target=labels, ` out of run_epoch: which rank complains, and why only that one?
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
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.data import fetch, load, whole_batch
from common.flags import flags, parse
from common.guard_rails import deadline, explain, sign_in
from common.models import MODELS, cut
from common.profiling import profiled
from common.timeline import show, watch


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


def save(args, epoch, model, optimizer):
    """Collect all stages on rank 0, and write a checkpoint like those of the other lessons."""
    moments = {i: {k: v.cpu() for k, v in each.items()} for i, each in optimizer.state_dict()["state"].items()}
    weights = {name: w.detach().cpu() for i, (name, w) in enumerate(model.named_parameters()) if i in moments}
    dist.gather_object((weights, moments), ranks := [None] * args.world_size if dist.get_rank() == 0 else None)
    if ranks:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch, "args": vars(args)}
        for weights, moments in ranks:  # NEW: each rank has changed its own stages only
            state["model"] |= weights
            state["optimizer"]["state"] |= moments
        with open(f"{args.savefile}.tmp", "wb") as file:  # under another name first: a crash leaves the last one whole
            torch.save(state, file)
        os.replace(f"{args.savefile}.tmp", args.savefile)


def pipeline(model, device, schedule, micro_batches):
    """Move this rank's stages to its device. Returns the schedule that runs them, and the stages."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = cut(model, world_size * (2 if "Interleaved" in schedule else 1))
    mine = range(rank, len(parts), world_size)  # NEW: in turn, so that rank 0 has stages 0 and p, if it has two
    stages = [PipelineStage(parts[index].to(device), index, len(parts), device) for index in mine]
    made = get_schedule_class(schedule)(stages if len(stages) > 1 else stages[0], micro_batches, F.cross_entropy)
    return made, stages


def run_epoch(model, schedule, loader, device, args, optimizer=None):
    """Train, or test without an optimizer, on each batch. Returns the sums of loss, hits, images, float64 (3,)."""
    model.train(optimizer is not None)
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # read once an epoch: that waits for the GPU
    loss_sum, hits, seen = totals  # views: what is added to them is added to totals
    for images, labels in loader:
        count, losses = len(labels), []
        images = F.pad(images, [0] * 7 + [args.batch_size - count])  # NEW: stages are made for one size of batch
        labels = F.pad(labels, [0, args.batch_size - count]).to(device)
        inputs = [images.to(device)] if dist.get_rank() == 0 else []  # NEW: the others get theirs from the rank before
        with torch.set_grad_enabled(optimizer is not None):
            run = schedule.step if optimizer else schedule.eval  # NEW: m times forward and backward, or only forward
            logits = run(*inputs, target=labels, losses=losses)
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
        if logits is not None:  # NEW: only the last rank has them
            loss_sum += torch.stack(losses).mean().detach() * count
            hits += (logits.argmax(dim=1) == labels)[:count].sum()
            seen += count
    dist.all_reduce(totals)
    return totals


def observe(model, batch, device, args):
    """Measure a step with micro-batches and one in one piece. Rank 0 prints both, and draws them for --plot."""
    steps = {}
    for name, pieces in ((args.schedule, args.micro_batches), ("GPipe", 1)):
        schedule, stages = pipeline(model, device, name, pieces)
        steps[name, pieces] = watch(schedule, stages, *(tensor.to(device) for tensor in batch))
    if dist.get_rank() == 0:
        show(steps, [f"rank {rank}" for rank in range(args.world_size)], args.plot)


def train(local_rank, args):
    """Train, test and report, one line an epoch; then show who computes when."""
    rank, device = join(local_rank, args)
    try:
        torch.manual_seed(args.seed)
        train_set, test_set = load(args.dataset, args.data_dir)
        order = torch.Generator()
        sampler = RandomSampler(train_set, generator=order)  # NEW: all ranks read the same batches
        train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, drop_last=True, collate_fn=whole_batch)
        test_loader = DataLoader(test_set, args.batch_size, collate_fn=whole_batch)
        model = MODELS[args.model](args.width, args.layers)  # NEW: all of it, on the CPU; only the stages move
        schedule, _stages = pipeline(model, device, args.schedule, args.micro_batches)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)  # skips what has no gradient here

        for epoch in range(args.epochs):
            order.manual_seed(args.seed + epoch)  # another order in each epoch, the same in each run
            start = time.perf_counter()
            bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)  # None: only on a terminal
            steps = profiled(bar, args.profile)
            loss, hits, seen = run_epoch(model, schedule, steps, device, args, optimizer).tolist()
            seconds = time.perf_counter() - start
            _, test_hits, test_seen = run_epoch(model, schedule, test_loader, device, args).tolist()
            if rank == 0:
                line = f"epoch {epoch + 1}/{args.epochs}  loss {loss / seen:.4f}  train {hits / seen:.2%}"
                line += f"  test {test_hits / test_seen:.2%}  {seconds:.2f} s  {seen / seconds:,.0f} images/s"
                print(line, flush=True)
            if args.savefile:
                save(args, epoch + 1, model, optimizer)
        observe(model, next(iter(train_loader)), device, args)
        dist.barrier()  # leave together
    finally:
        dist.destroy_process_group()
    os._exit(0)  # not through Python's shutdown, during which a thread of gloo may abort


def main():
    """Start the ranks of this node and wait for them. One that fails ends them all, with one line."""
    parser = flags(__doc__)
    schedules = ["GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble"]
    parser.add_argument("--schedule", choices=schedules, default="GPipe")
    parser.add_argument("--micro_batches", type=int, default=8, help="pieces of a batch")
    parser.add_argument("--plot", metavar="PNG", help="draw the timeline into this file")
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
