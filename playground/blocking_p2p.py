"""Blocking point-to-point: processes with a rank, send and recv, and who waits for whom.

A distributed program is one script that runs in several processes at once, on one machine (a node) or on many. Each
process has a rank, from 0 to world_size - 1, and a local rank on its node. They meet at an address that all know and
form a process group (`join`). A backend carries its messages: gloo between CPUs, NCCL between GPUs. Then one rank sends
a tensor, and another, with a buffer of that shape and dtype, receives it. On CPUs both calls block: recv until the
numbers are here, send until the other rank receives them.

    python playground/blocking_p2p.py              # two processes, started by this script
    python playground/blocking_p2p.py -g 3         # three: the numbers go from 0 to 1 to 2
    python playground/blocking_p2p.py --deadlock
    python playground/blocking_p2p.py -n 2 -g 1 -nr 0 -ip <ip of node 0>    # rank 0 here, and on node 1 with -nr 1

Or start each rank by hand, in a terminal of its own: type the first line in both, then one of the others in each:

    export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=8888
    RANK=0 LOCAL_RANK=0 python playground/blocking_p2p.py
    RANK=1 LOCAL_RANK=1 python playground/blocking_p2p.py

It prints who is who, and then, on CPUs (on GPUs send only puts the message into a queue):

    rank 0 comes a second late:
    rank 0: [0.0, 1.0, 2.0, 3.0] -> [0.0, 1.0, 2.0, 3.0], 0.0 s in recv, 0.0 s in send
    rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0], 1.0 s in recv, 0.0 s in send

Break it, in a copy (cp playground/blocking_p2p.py playground/broken.py). Which rank says what, and why?
  1. Give rank 1 a buffer of three numbers.
  2. Let rank 1 receive from `src=1`, itself.
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
    init_method = args.init_method or f"tcp://{args.ip}:{args.port}"
    if "RANK" in os.environ:  # started by hand: the environment says who this is, and where to meet
        rank, world_size, init_method = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://"
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else every rank would also use GPU 0
    dist.init_process_group(
        args.backend or ("nccl" if device.type == "cuda" else "gloo"),  # the backend, which carries messages
        init_method=init_method,  # where the processes meet: rank 0 listens at this address, the others connect to it
        rank=rank,  # which process this is, 0 to world_size - 1: no two may have the same
        world_size=world_size,  # how many must come: the call returns when all of them have
        timeout=timedelta(seconds=args.timeout),  # to meet, and for each message: gloo raises then, NCCL ends the rank
        device_id=device if device.type == "cuda" else None,  # this process's GPU: NCCL connects at once, not later
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


def relay(rank, device, late=None):
    """Pass four numbers from rank 0 to rank 1, on to rank 2 and so on; one may be late. Returns what this rank saw."""
    numbers = torch.arange(4.0, device=device) if rank == 0 else torch.zeros(4, device=device)
    before = numbers.tolist()
    time.sleep(1 if rank == late else 0)
    start = now(device)
    if rank > 0:
        dist.recv(numbers, src=rank - 1)  # comes back when the numbers are here
    received = now(device)
    if rank < dist.get_world_size() - 1:
        dist.send(numbers, dst=rank + 1)  # on CPUs it comes back when they are received, on GPUs at once
    times = f"{received - start:.1f} s in recv, {time.perf_counter() - received:.1f} s in send"
    return f"rank {rank}: {before} -> {numbers.tolist()}, {times}"


def exchange(order, rank, device, group=None):
    """Send my rank to the right neighbour and receive the left one's, in one of four orders. Returns what came."""
    right, left = (rank + 1) % dist.get_world_size(), (rank - 1) % dist.get_world_size()
    mine, theirs = torch.tensor([rank], device=device), torch.tensor([-1], device=device)
    if order == "all send first" or (order == "even ranks send first" and rank % 2 == 0):
        dist.send(mine, right, group)
        dist.recv(theirs, left, group)
    elif order == "even ranks send first":  # an odd rank receives first: that breaks the circle
        dist.recv(theirs, left, group)
        dist.send(mine, right, group)
    elif order == "isend and irecv":  # both start, and neither blocks (on NCCL, long messages need the next order)
        for request in [dist.isend(mine, right, group), dist.irecv(theirs, left, group)]:
            request.wait()
    else:  # the same, handed to the backend together
        operations = [dist.P2POp(dist.isend, mine, right, group), dist.P2POp(dist.irecv, theirs, left, group)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return theirs.item()


def talk(local_rank, args):
    """Show who waits for whom; with --deadlock, how all can wait for each other and how not."""
    rank, device = join(local_rank, args)
    if args.deadlock:
        impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))  # all ranks, in a second group
        try:
            report(f"rank {rank}: {exchange('all send first', rank, torch.device('cpu'), impatient)}")
        except RuntimeError:  # gloo's: it has waited for 3 s, or the other rank gave up before
            who = (rank + 1) % dist.get_world_size()
            report(f"rank {rank}: DEADLOCK: rank {who} receives only after its own send, which waits like mine")
        for order in ("even ranks send first", "isend and irecv", "batch_isend_irecv"):
            report(f"rank {rank}: {order}: received {exchange(order, rank, device)}")
    else:
        relay(rank, device)  # only to connect the ranks, which takes NCCL a while
        for late in (0, 1):
            if rank == 0:
                print(f"rank {late} comes a second late:", flush=True)
            report(relay(rank, device, late))
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
    add("--deadlock", action="store_true", help="let all send before they receive; then three cures")
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
