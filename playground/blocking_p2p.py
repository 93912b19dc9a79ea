"""Blocking point-to-point messages: ranks, a process group, send and recv, and deadlock.

A distributed program is one script that runs in several processes at the same time, on one machine
or on several. A machine is called a node. The total number of processes is the world size. Each
process has a rank, which is its number over all nodes, from 0 to world size - 1. Its local rank is
its number on its own node.

Processes share no memory, so they exchange data as messages. First they find each other at an
address that is given to all of them (the rendezvous), and form a process group: see join below. A
backend carries the messages: gloo between CPUs, NCCL between GPUs.

Then one rank can call send, and another rank can call recv. recv writes into a tensor that exists
already, the buffer. It must have the shape and the dtype of the tensor that is sent. On CPUs both
calls block: recv returns when the data has arrived, and send returns when the other rank has called
recv and the data is on its way. If ranks block and wait for each other in a circle, none of them
ever returns: a deadlock. On GPUs both calls only add work to a queue of the GPU, and return at
once.

Run it:
    python playground/blocking_p2p.py              # two processes, started by this script
    python playground/blocking_p2p.py -g 3         # three: rank 0 sends to rank 1, then 1 to 2
    python playground/blocking_p2p.py --deadlock   # all ranks wait for each other; then the cures

Run it on two nodes, each command on its own node:
    python playground/blocking_p2p.py -n 2 -g 1 -nr 0 -ip <ip of node 0>
    python playground/blocking_p2p.py -n 2 -g 1 -nr 1 -ip <ip of node 0>

It prints a table of the ranks. Then numbers travel from rank 0 to rank 1 and on to the last rank,
two times: once rank 0 starts a second late, and once rank 1. The first time prints, on CPUs:
    rank 0 starts a second late:
    rank 0: [0.0, 1.0, 2.0, 3.0] -> [0.0, 1.0, 2.0, 3.0], 0.0 s in recv, 0.0 s in send
    rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0], 1.0 s in recv, 0.0 s in send
    rank 0 |zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzzz|
    rank 1 |rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr|

The lists show the buffer of a rank before and after the calls. In the rows of letters, one for each
rank, time runs to the right. z means that the rank sleeps, r that it is in recv, s that it is in
send.

Try breaking it, in a copy (cp playground/blocking_p2p.py playground/broken.py):
  1. Give rank 1 a buffer of three numbers. Which rank fails, and with what message?
  2. Let rank 1 receive from `src=1`, which is itself. Which rank fails, and with what message?

Now write it yourself: swap_with_neighbour.py and tree_broadcast.py in playground/exercises/.
README.md in that folder says how.

The next lesson, nonblocking_p2p.py, computes while a message is on its way.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import old_flags as flags
from common.guard_rails import check, explained
from common.report import RANKS, rank_row
from common.roll_call import meet
from measure.timeline import Calls


def join(local_rank, args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    # The nodes before this one have args.gpus ranks each.
    rank = args.nr * args.gpus + local_rank
    # If each rank is started by hand (see main), the environment has its local rank.
    local_rank = int(os.environ.get("LOCAL_RANK", local_rank))
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
    dist.init_process_group(
        args.backend or backend,
        # The address of the rendezvous: rank 0 listens there, and the other ranks connect to it.
        init_method=args.init_method or f"tcp://{args.ip}:{args.port}",
        rank=rank,  # this process; no two processes may have the same rank
        world_size=args.nodes * args.gpus,  # all processes; the call returns when all have joined
        # How long to wait for the other ranks, here and in each message. After this time, gloo
        # raises an error, and NCCL ends the process.
        timeout=timedelta(seconds=args.timeout),
        device_id=gpu,  # NCCL then starts here, and not later, at the first message
    )
    if rank == 0:
        print(RANKS, flush=True)
    report(rank_row(args.nr, rank, local_rank, device))
    return rank, device


def relay(rank, device, late=None):
    """Pass four numbers from rank 0 to rank 1, then to rank 2 and so on. One rank may start late.

    Returns a line with the buffer before and after, and the seconds spent in each call.
    """
    if rank == 0:
        numbers = torch.arange(4.0, device=device)
    else:
        numbers = torch.zeros(4, device=device)  # the buffer: same shape and dtype
    before = numbers.tolist()
    if rank == late:
        time.sleep(1)
    start = now(device)
    if rank > 0:
        dist.recv(numbers, src=rank - 1)  # on CPUs, returns when the data has arrived
    received = now(device)  # NCCL's recv returns before the data arrives, so now() waits for it
    if rank < dist.get_world_size() - 1:
        dist.send(numbers, dst=rank + 1)  # on CPUs, returns when the other rank receives
    sent = time.perf_counter()  # not now(), to show that NCCL's send returns at once
    times = f"{received - start:.1f} s in recv, {sent - received:.1f} s in send"
    return f"rank {rank}: {before} -> {numbers.tolist()}, {times}"


def exchange(order, rank, device, group=None):
    """Send this rank's number to the right neighbour and receive the left neighbour's.

    The ranks form a ring: the right neighbour of the last rank is rank 0. There are four ways to
    order the two calls. Returns the number that was received.
    """
    right = (rank + 1) % dist.get_world_size()
    left = (rank - 1) % dist.get_world_size()
    mine = torch.tensor([rank], device=device)
    theirs = torch.tensor([-1], device=device)
    if order == "all ranks send first":
        # A deadlock: each send blocks until the right neighbour receives, but that rank is in its
        # own send.
        dist.send(mine, dst=right, group=group)
        dist.recv(theirs, src=left, group=group)
    elif order == "even ranks send first":
        # Odd ranks receive first, so their left neighbours can finish their sends. If the number of
        # ranks is odd, the last rank and its right neighbour, rank 0, both send first. This is no
        # deadlock: rank 1 receives from rank 0, and then rank 0 receives from the last rank.
        if rank % 2 == 0:
            dist.send(mine, dst=right, group=group)
            dist.recv(theirs, src=left, group=group)
        else:
            dist.recv(theirs, src=left, group=group)
            dist.send(mine, dst=right, group=group)
    elif order == "isend and irecv":
        # Neither call blocks. Each returns a request at once, and wait() blocks until the message
        # is complete. Do not use this cure with NCCL. It may run a rank's isend before its irecv,
        # so all GPUs could wait in isend.
        to_right = dist.isend(mine, dst=right, group=group)
        from_left = dist.irecv(theirs, src=left, group=group)
        to_right.wait()
        from_left.wait()
    else:
        # The same, but the backend gets both operations in one call, so NCCL runs them together.
        to_right = dist.P2POp(dist.isend, mine, right, group)
        from_left = dist.P2POp(dist.irecv, theirs, left, group)
        operations = [to_right, from_left]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return theirs.item()


def show_deadlock(rank, device):
    """Make all ranks wait for each other for three seconds. Then show the cures."""
    # A second process group of all ranks, in which a message may take three seconds at most. It
    # uses gloo, also on GPUs: after three seconds, gloo raises an error, but NCCL would end the
    # process.
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    try:
        received = exchange("all ranks send first", rank, torch.device("cpu"), impatient)
        report(f"rank {rank}: received {received}")
    except RuntimeError:  # gloo raises it after three seconds, or when the other rank has timed out
        right = (rank + 1) % dist.get_world_size()
        report(f"rank {rank}: DEADLOCK: rank {right} did not receive, because it was in send, too")
    for order in ("even ranks send first", "isend and irecv", "batch_isend_irecv"):
        if order == "isend and irecv" and dist.get_backend() == "nccl":
            continue
        received = exchange(order, rank, device)
        report(f"rank {rank}: {order}: received {received}")


def report(line):
    """Print one line from each rank, in the order of the ranks.

    all_gather_object is a collective: all ranks call it together, and each one receives the objects
    of all ranks. The lesson collectives.py explains such calls.
    """
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def now(device):
    """Return the time in seconds. GPU calls are asynchronous, so wait until they are done."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


@explained  # guard rail: explains errors
def talk(local_rank, args):
    """Show which rank waits in which call, or, with --deadlock, how all ranks can wait forever."""
    rank, device = join(local_rank, args)
    if args.deadlock:
        show_deadlock(rank, device)
    else:
        # The first messages connect each rank to the next, which takes NCCL a while. PyTorch may
        # warn of "unbatched P2P ops", which are messages outside batch_isend_irecv. NCCL runs such
        # messages of a rank one after the other, and here this does no harm.
        relay(rank, device)
        for late in (0, 1):
            if rank == 0:
                print(f"rank {late} starts a second late:", flush=True)
            # Calls() notes when this rank sleeps, or is in a call that sends or receives. show()
            # draws a line of letters for each rank.
            with Calls() as calls:
                line = relay(rank, device, late)
            report(line)
            calls.show()
    dist.destroy_process_group()


@explained  # guard rail: explains errors
def main():
    """Read the flags and start the ranks of this node."""
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    add("-n", "--nodes", type=int, default=1, help="number of nodes")
    add("-g", "--gpus", type=int, default=max(gpus, 2), help="ranks of a node; default: GPUs or 2")
    add("-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", default="127.0.0.1", help="address of node 0")
    add("--port", type=int, default=8888, help="port of node 0; -n 1 takes a free one")
    add("--init_method", metavar="URL", help="replaces -ip, --port: tcp://..., env://, file:///...")
    add("--device", choices=["cpu", "cuda"], default="cuda" if gpus > 1 else "cpu")
    add("--backend", choices=["gloo", "nccl", "mpi"], help="default: nccl on GPUs, gloo on CPUs")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--deadlock", action="store_true", help="let all ranks send first; then the cures")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    if "RANK" in os.environ:
        # Each rank was started by hand, for example with `RANK=0 LOCAL_RANK=0 WORLD_SIZE=2
        # MASTER_ADDR=127.0.0.1 MASTER_PORT=8888 python playground/blocking_p2p.py`, and in a second
        # terminal with RANK=1 LOCAL_RANK=1. So it counts as a node of its own, with one process.
        args.nodes = int(os.environ["WORLD_SIZE"])
        args.gpus = 1
        args.nr = int(os.environ["RANK"])
        args.init_method = "env://"  # the address is in MASTER_ADDR and MASTER_PORT
    if args.nodes * args.gpus < 2:
        parser.error("a message needs two processes: use -g 2")
    meet(args)  # guard rail: finds the other nodes
    # Calls talk(0, args), talk(1, args) and so on, each in a process of its own.
    mp.spawn(talk, (args,), args.gpus)


if __name__ == "__main__":
    main()
