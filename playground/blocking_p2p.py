"""Blocking messages: start processes, let one send to another, and see which of them waits.

Run it:
    python playground/blocking_p2p.py    # two processes; -g 3: three

Rank 0 sends to rank 1 twice: the first time it is a second late itself, the second time rank 1 is.
After a table of the ranks, it prints on CPUs:
    rank 0 starts a second late:
    rank 0: [0.0, 1.0, 2.0, 3.0], 0.0 s in send
    rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0], 1.0 s in recv
    rank 1 starts a second late:
    rank 0: [0.0, 1.0, 2.0, 3.0], 1.0 s in send
    rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0], 0.0 s in recv

`main()` starts the processes. Each runs `talk()`, and has a number, its rank, counted from 0 across
all machines (nodes). There it joins the process group, whose members can exchange messages, and
calls `relay()`. Processes share no memory: one rank calls `send`, and another calls `recv`, which
fills an existing tensor (the buffer). On CPUs, both calls block until the other rank makes its
call. If all ranks wait for each other, none of them ever continues, which is called a deadlock. The
lesson gives up after three seconds:
    python playground/blocking_p2p.py --deadlock
    rank 0: DEADLOCK: rank 1 did not receive, because it was in send, too
    rank 1: DEADLOCK: rank 0 did not receive, because it was in send, too
    rank 0: even ranks send first: received 1
    rank 1: even ranks send first: received 0

On two nodes, each command on its own node:
    python playground/blocking_p2p.py -n 2 -g 1 -nr 0 -ip <ip of node 0>
    python playground/blocking_p2p.py -n 2 -g 1 -nr 1 -ip <ip of node 0>

Try breaking it, in a copy (cp playground/blocking_p2p.py playground/broken.py):
  1. Give rank 1 a buffer of three numbers. Which rank fails, and with what message?
  2. Let rank 1 receive from `src=1`, which is itself. Which rank fails, and with what message?
  3. With `-g 3 --deadlock`, ranks 2 and 0 are neighbours and both even. Why does the cure work?
Now write it yourself: `swap_with_neighbour.py` and `tree_broadcast.py` in playground/exercises/.
The next lesson, `nonblocking_p2p.py`, computes while a message is on its way.
"""

import os
import platform
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find common/ from any folder
from common import flags


def relay(rank, device, late):
    """Pass four numbers from rank 0 to rank 1, then to rank 2 and so on. One rank starts late."""
    if rank == 0:
        numbers = torch.arange(4.0, device=device)
    else:
        numbers = torch.zeros(4, device=device)  # NEW: the buffer, shaped as what is sent
    line = f"rank {rank}: {numbers.tolist()}"
    if rank == late:
        time.sleep(1)
    if rank > 0:
        start = time.perf_counter()
        dist.recv(numbers, src=rank - 1)  # NEW: on CPUs, returns when the numbers have arrived
        line += f" -> {numbers.tolist()}"  # a GPU's recv returns at once, and this line waits
        line += f", {time.perf_counter() - start:.1f} s in recv"
    if rank < dist.get_world_size() - 1:
        start = time.perf_counter()
        dist.send(numbers, dst=rank + 1)  # NEW: on CPUs, returns when that rank has called recv
        line += f", {time.perf_counter() - start:.1f} s in send"
    report(line)  # prints the lines of all ranks


def talk(local_rank, args):
    """As one of the ranks, show which rank waits, or, with --deadlock, how all of them wait."""
    rank, device = join(local_rank, args)
    if args.deadlock:
        show_deadlock(rank, device)
    else:
        for late in (0, 1):
            if rank == 0:
                print(f"rank {late} starts a second late:", flush=True)
            relay(rank, device, late)
    dist.destroy_process_group()


def all_ranks_send_first(mine, theirs, right, left, group):
    """Send `mine` to the right neighbour, and receive `theirs` from the left one: a deadlock."""
    # NEW: each send waits until the right neighbour receives, but that rank is in its own send.
    dist.send(mine, dst=right, group=group)
    dist.recv(theirs, src=left, group=group)


def even_ranks_send_first(mine, theirs, right, left):
    """Do the same without a deadlock."""
    if dist.get_rank() % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(theirs, src=left)
    else:
        # NEW: odd ranks receive first, so that the sends of their left neighbours can finish.
        dist.recv(theirs, src=left)
        dist.send(mine, dst=right)


def show_deadlock(rank, device):
    """Let all ranks wait for each other for three seconds. Then exchange in a better order."""
    right = (rank + 1) % dist.get_world_size()  # a ring: rank 0 is to the right of the last rank
    left = (rank - 1) % dist.get_world_size()
    # A second group of all ranks: gloo raises an error if a message takes more than three seconds.
    # (NCCL would end the process. So with GPUs, too, these are CPU tensors, which gloo sends.)
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))
    try:
        all_ranks_send_first(torch.tensor([rank]), torch.tensor([-1]), right, left, impatient)
    except RuntimeError:
        report(f"rank {rank}: DEADLOCK: rank {right} did not receive, because it was in send, too")
    mine = torch.tensor([rank], device=device)
    theirs = torch.tensor([-1], device=device)
    even_ranks_send_first(mine, theirs, right, left)
    report(f"rank {rank}: even ranks send first: received {theirs.item()}")


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.add_argument("--deadlock", action="store_true", help="all ranks send first; then a cure")


# ---------- The frame: the next two lessons repeat what follows ----------
# Read join() now, and skim the rest.


def join(local_rank, args):
    """Join the process group, and print the table of ranks. Returns this rank and its device."""
    rank = args.nr * args.gpus + local_rank  # the nodes before this one have args.gpus ranks each
    world_size = args.nodes * args.gpus  # the number of all ranks
    # The local rank counts from 0 on each node. (A rank that torchrun has started finds it in the
    # environment. Skip this at first reading, here and in main().)
    local_rank = int(os.environ.get("LOCAL_RANK", local_rank))
    device = torch.device(args.device)
    gpu = None
    if args.device != "cpu":
        gpu = device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    # The backend carries the messages: gloo between CPUs, NCCL between NVIDIA's GPUs.
    backend = args.backend or dist.get_default_backend_for_device(device)
    # The rendezvous: rank 0 listens at this address, and the other ranks connect to it.
    address = args.init_method or f"tcp://{args.ip}:{args.port}"
    try:
        # NEW: each rank makes this call. From then on, they can send each other messages.
        dist.init_process_group(
            backend,
            init_method=address,
            rank=rank,  # no two processes may have the same
            world_size=world_size,  # the call returns when this many have joined
            timeout=timedelta(seconds=args.timeout),  # for the start, and for each message
            device_id=gpu,  # NCCL then starts here, and not at the first message
        )
    except dist.DistError as error:  # ranks are missing, or the port is taken
        error.add_note(
            f"All {world_size} ranks must connect to {address}: start every node, with the same -n,"
            " -g and -ip, and the same free --port (torchrun sets MASTER_ADDR and MASTER_PORT)."
        )
        raise
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", flush=True)
    report(f"{args.nr:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}")
    return rank, device


def report(line):
    """Print a line from each rank, in the order of the ranks.

    All ranks call it together: all_gather_object gives each of them the lines of all.
    collectives.py explains calls that all ranks make together.
    """
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def main():
    """Read the flags and start the ranks of this node."""
    parser = flags.Parser(__doc__)
    add = parser.add_argument
    accelerator = flags.accelerator()
    found = torch.accelerator.device_count() if accelerator != "cpu" else 0
    device = accelerator if found > 1 else "cpu"
    add("-n", "--nodes", type=flags.positive, default=1, help="number of nodes")
    add("-g", "--gpus", type=flags.positive, default=max(found, 2), help="ranks of each node")
    add("-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", help="address of node 0")
    add("--port", type=flags.port, default=8888, help="port of node 0; -n 1 takes a free one")
    add("--init_method", metavar="URL", help="replaces -ip, --port: tcp://..., env://, file:///...")
    add("--device", type=flags.device, default=device, help="cpu, or this machine's accelerator")
    add("--backend", help="default: nccl on NVIDIA's GPUs, gloo on CPUs")
    add("--timeout", type=flags.positive, default=60, help="seconds to wait for another rank")
    add_flags(parser)
    args = parser.parse_args()
    if "RANK" in os.environ:
        # This rank was started by hand or by torchrun, which a later lesson explains. It counts as
        # a node of its own.
        parser.check_torchrun(args)
        args.nr = int(os.environ["RANK"])
        args.nodes = int(os.environ["WORLD_SIZE"])
        args.gpus = 1
        args.init_method = "env://"
    parser.check_nodes(args)
    if args.backend == "gloo" and args.device != "cpu":
        parser.error("gloo cannot send GPU memory: leave --backend out")
    if args.nodes * args.gpus < 2:
        parser.error("a message needs two ranks: use -g 2")
    if args.nodes == 1 and not args.init_method:
        args.ip = "127.0.0.1"
        with socket.create_server((args.ip, 0)) as server:  # a port that is free now
            args.port = server.getsockname()[1]
    if args.device == "cpu":  # hide gloo's C++ back traces; Python raises the same errors
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        # Calls talk(0, args), talk(1, args) and so on, each in a process of its own.
        mp.spawn(talk, (args,), args.gpus)
    except mp.ProcessRaisedException as error:
        sys.exit(str(error))  # the traceback of the rank that failed first
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for process in mp.active_children():
            process.kill()  # no rank outlives this process


if __name__ == "__main__":
    main()
