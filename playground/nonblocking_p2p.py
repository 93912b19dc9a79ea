"""Non-blocking point-to-point: isend and irecv, working while a message travels, and a ring over all ranks.

isend and irecv come back at once with a request, and the message travels while this process works. Until request.wait()
has come back the buffer belongs to the message: don't change what you send, don't read what you receive.
The ring passes chunks around until each rank has the sum of all: an all-reduce, made of messages between neighbours.

    python playground/nonblocking_p2p.py          # two processes, started by this script
    python playground/nonblocking_p2p.py -g 4     # a ring of four; several nodes and by hand as in blocking_p2p.py

Rank 0 comes half a second late, and each rank has half a second of work. It prints who is who, and then:

    blocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0] in 1.0 s, 0.5 s of it not working, 52,598 matrix products
    nonblocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0] in 0.5 s, 0.0 s of it not working, 51,611 matrix products
    ring, rank 1: [0.0, 2.0, 4.0, 6.0, 8.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], as dist.all_reduce: True

Break it, in a copy: fill `mine` with 9s right after batch_isend_irecv. Which rank gets them, and why?
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.guard_rails import check, explained, meet


def join(local_rank, args):
    """Join the process group and print who is who. Returns this process's rank and its device."""
    rank, world_size = args.nr * args.gpus + local_rank, args.nodes * args.gpus
    init_method = args.init_method or f"tcp://{args.ip}:{args.port}"  # where all meet: rank 0 listens there
    if "RANK" in os.environ:  # started by hand: the environment says who this is, and where to meet
        rank, world_size, init_method = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://"
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else every rank would also use GPU 0
    dist.init_process_group(
        args.backend or ("nccl" if device.type == "cuda" else "gloo"),  # what carries the messages
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=args.timeout),  # to meet, and of each message
        device_id=device if device.type == "cuda" else None,
    )
    node, title = os.environ.get("GROUP_RANK", args.nr), ["node  rank  local_rank  device  pid     host"]
    report(f"{node:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{os.uname().nodename}", title)
    return rank, device


def report(line, title=()):
    """Print every rank's line, in the order of the ranks."""
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)  # a collective: all ranks call it, each gets what all have given
    if dist.get_rank() == 0:
        print(*title, *lines, sep="\n", flush=True)


def now(device):
    """Return the time in seconds. A GPU runs behind the Python code: wait until it has done what it was told."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def work(device):
    """Multiply matrices for half a second, which needs no message. Returns how often."""
    matrix, products, end = torch.ones(32, 32, device=device), 0, now(device) + 0.5
    while now(device) < end:
        matrix @ matrix
        products += 1
    return products


def blocking(rank, mine, theirs, right, left):
    """Exchange with send and recv, then work. Returns the number of matrix products."""
    if rank % 2 == 0:
        dist.send(mine, right)
        dist.recv(theirs, left)
    else:  # an odd rank receives first, or all would send
        dist.recv(theirs, left)
        dist.send(mine, right)
    return work(mine.device)


def nonblocking(rank, mine, theirs, right, left):
    """Ask for the exchange, work while it goes on. Returns the number of matrix products."""
    operations = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]
    requests = dist.batch_isend_irecv(operations)  # NEW: both are asked for at once, as NCCL wants it, not waited for
    products = work(mine.device)  # NEW: while the messages travel, or wait for a late neighbour
    for request in requests:
        request.wait()  # NEW: from here on `mine` may be changed and `theirs` read
    return products


def ring_all_reduce(tensor):
    """Replace a 1-D tensor by its sum over all ranks, with messages between neighbours only.

    It is cut into a chunk for each rank. First rank r sends chunk r to the right, where it is added; then each passes
    on the chunk that it has just added to. After world_size - 1 steps every rank has one finished chunk, with all
    ranks' numbers in it, and in as many steps these go round and are copied.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)  # NEW: views, of equal length or one longer
    for step in range(2 * (world_size - 1)):
        mine, target = chunks[(rank - step) % world_size], chunks[(rank - step - 1) % world_size]
        theirs = torch.empty_like(target)
        operations = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        target.copy_(theirs if step >= world_size - 1 else target + theirs)


def talk(local_rank, args):
    """Exchange with and without blocking, then sum up over the ring."""
    rank, device = join(local_rank, args)
    right, left = (rank + 1) % dist.get_world_size(), (rank - 1) % dist.get_world_size()
    ring_all_reduce(torch.zeros(4, device=device))  # only to connect the ranks, which takes NCCL a while
    for exchange in (blocking, nonblocking):
        mine, theirs = torch.full((2,), float(rank), device=device), torch.full((2,), -1.0, device=device)
        before, start = theirs.tolist(), now(device)
        time.sleep(0.5 if rank == 0 else 0)  # rank 0 comes half a second late
        products = exchange(rank, mine, theirs, right, left)
        seconds = now(device) - start
        times = f"{seconds:.1f} s, {seconds - 0.5:.1f} s of it not working, {products:,} matrix products"
        report(f"{exchange.__name__}, rank {rank}: {before} -> {theirs.tolist()} in {times}")
    numbers = torch.arange(5.0, device=device) * (rank + 1)
    before, expected = numbers.tolist(), numbers.clone()
    dist.all_reduce(expected)
    ring_all_reduce(numbers)
    report(f"ring, rank {rank}: {before} -> {numbers.tolist()}, as dist.all_reduce: {numbers.equal(expected)}")
    dist.destroy_process_group()


def main():
    """Read the flags and start this node's ranks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, usage=argparse.SUPPRESS)
    add = parser.add_argument
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    add("-n", "--nodes", type=int, default=1, help="machines")
    add("-g", "--gpus", type=int, default=max(gpus, 2), help="processes on each; default: its GPUs, or 2")
    add("-nr", "--nr", type=int, default=0, help="number of this machine, from 0")
    add("-ip", "--ip", default="127.0.0.1", help="address of machine 0")
    add("--port", type=int, default=8888, help="of machine 0; a single machine chooses a free one")
    add("--init_method", metavar="URL", help="tcp://..., env:// or file:///a/new/file in place of -ip and --port")
    add("--device", choices=["cpu", "cuda"], default="cuda" if gpus > 1 else "cpu")
    add("--backend", choices=["gloo", "nccl", "mpi"], help="default: nccl on GPUs, gloo on CPUs")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    args = parser.parse_args()
    check(parser, args)  # guard rail
    if args.nodes * args.gpus < 2:
        parser.error("a message needs two processes: use -g 2")
    meet(args)  # guard rail
    if "RANK" in os.environ:
        talk(0, args)
    else:
        mp.spawn(talk, (args,), args.gpus)  # talk(0, args), talk(1, args), ... each in a process of its own


if __name__ == "__main__":
    with explained():  # guard rail
        main()
