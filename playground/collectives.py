"""Collectives: calls that all ranks make together, and what each rank holds before and after.

Run it:
    python playground/collectives.py    # two processes; -g 3: three

After a table of the ranks, it prints for each collective what every rank holds before and after:
    reduce_scatter: Each rank gets its chunk of the sum over all ranks.
    rank 0: [10.0, 11.0] -> [30.0]
    rank 1: [20.0, 21.0] -> [32.0]

`send` and `recv` involve two ranks. A collective involves all of them, and every rank must call it.
All ranks must also call the same collectives in the same order, with tensors of the same size.

Here each of n ranks has a tensor of n numbers, and a chunk is one number. If a collective gives
each rank one chunk, rank r gets chunk r. (The ring of `nonblocking_p2p.py` gave it chunk r + 1.)

An all_reduce is a reduce_scatter and then an all_gather. Around a ring, a rank sends n-1 chunks in
a reduce_scatter, as many in an all_gather, and 2(n-1) in an all_reduce. gloo and NCCL choose the
route.

Try breaking it, in a copy (cp playground/collectives.py playground/broken.py). Run each exercise
with --timeout 5. Then run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL in front of the command,
because PyTorch then compares the calls of the ranks.
  1. Let rank 1 skip a call: in the function `all_reduce`, write `if rank != 1:` before the line
     that calls `dist.all_reduce`. Where does each rank wait? (`watch.py`, in README, shows it.)
  2. Change the order: in `all_reduce`, add `ones = torch.ones_like(mine)`. Let rank 0 reduce `mine`
     and then `ones`, and the other ranks `ones` and then `mine`. What are the sums?
  3. Change the size: let rank 0 pass only `mine[:1]`, first in `broadcast`, then in `all_reduce`.
     Which of the two ends with an error?

Now write `reduce_scatter.py` and `all_gather.py`, and repair `fault_never_returns.py`, in
playground/exercises/.

Builds on: nonblocking_p2p.py
The next lesson, `single_gpu.py`, is the plain training loop that later lessons change.
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


# Each of these functions shows one collective, and returns what this rank holds after it.
def broadcast(mine, rank, n):
    """All ranks get rank 0's numbers."""
    # NEW: rank 0 sends `mine`, and on all other ranks it is overwritten.
    dist.broadcast(mine, src=0)
    return mine


def scatter(mine, rank, n):
    """Each rank gets its chunk of rank 0's numbers."""
    chunk = torch.empty_like(mine[:1])
    chunks = list(mine.chunk(n)) if rank == 0 else None
    # NEW: `chunks`, a list of one tensor for each rank, is needed on rank 0 only.
    dist.scatter(chunk, chunks, src=0)
    return chunk


def gather(mine, rank, n):
    """Each rank r gives its chunk r, and rank 0 gets all these chunks."""
    if rank == 0:
        whole = torch.empty_like(mine)
        chunks = list(whole.chunk(n))  # views, so gather writes into `whole`
    else:
        whole = mine[:0]  # empty, because this rank gets nothing
        chunks = None
    # NEW: the list has the buffers in which rank 0 receives, so the others pass None.
    dist.gather(mine.chunk(n)[rank], chunks, dst=0)
    return whole


def all_gather(mine, rank, n):
    """Each rank r gives its chunk r, and all ranks get all these chunks."""
    whole = torch.empty_like(mine)
    # NEW: the chunks stand in `whole` in the order of the ranks. (Newer versions of PyTorch also
    # call it all_gather_single.)
    dist.all_gather_into_tensor(whole, mine.chunk(n)[rank])
    return whole


def reduce(mine, rank, n):
    """Rank 0 gets the sum over all ranks."""
    # NEW: the sum replaces `mine`. With op=dist.ReduceOp.MAX it would be the maximum.
    dist.reduce(mine, dst=0)
    return mine if rank == 0 else mine[:0]  # what is left on other ranks is undefined


def reduce_scatter(mine, rank, n):
    """Each rank gets its chunk of the sum over all ranks."""
    chunk = torch.empty_like(mine[:1])
    # NEW: `mine` has a chunk for each rank. (Newer versions of PyTorch also call it
    # reduce_scatter_single.)
    dist.reduce_scatter_tensor(chunk, mine)
    return chunk


def all_to_all(mine, rank, n):
    """Rank r gets chunk r of each rank, as if rows of a matrix became columns."""
    whole = torch.empty_like(mine)
    # NEW: chunk r of `mine` goes to rank r. Chunk r of `whole` comes from rank r.
    dist.all_to_all_single(whole, mine)
    return whole


def all_reduce(mine, rank, n):
    """All ranks get the sum over all ranks."""
    # NEW: the sum replaces `mine` on every rank.
    dist.all_reduce(mine)
    return mine


COLLECTIVES = [
    broadcast,
    scatter,
    gather,
    all_gather,
    reduce,
    reduce_scatter,
    all_to_all,
    all_reduce,
]


def talk(local_rank, args):
    """Show each collective, an all_reduce that is made of two others, async_op and a barrier."""
    rank, device = join(local_rank, args)
    n = dist.get_world_size()
    numbers = torch.arange(float(n), device=device) + 10 * (rank + 1)  # on rank 0: 10, 11, ...
    for collective in COLLECTIVES:
        after = collective(numbers.clone(), rank, n)
        if rank == 0:
            print(f"{collective.__name__}: {collective.__doc__}", flush=True)
        report(f"rank {rank}: {numbers.tolist()} -> {after.tolist()}")
    show_two_for_one(numbers, rank, n)
    show_async_op(numbers, rank)
    show_barrier(rank)
    dist.destroy_process_group()


def show_two_for_one(numbers, rank, n):
    """Build an all_reduce out of two other collectives."""
    chunk = reduce_scatter(numbers, rank, n)
    whole = torch.empty_like(numbers)
    # NEW: each rank gives its chunk of the sum, so all ranks get the whole sum.
    dist.all_gather_into_tensor(whole, chunk)
    equal = whole.equal(all_reduce(numbers.clone(), rank, n))
    if rank == 0:
        print("reduce_scatter, then all_gather: together they are an all_reduce", flush=True)
    steps = f"{numbers.tolist()} -> {chunk.tolist()} -> {whole.tolist()}"
    report(f"rank {rank}: {steps}, = all_reduce: {equal}")


def show_async_op(numbers, rank):
    """Add up the numbers of all ranks, without waiting for the messages."""
    total = numbers.clone()
    # NEW: each collective above takes async_op=True. It then returns a handle at once, which is
    # like the requests of isend and irecv. Until wait() returns, do not read or change `total`.
    handle = dist.all_reduce(total, async_op=True)
    # Here this rank could compute something else, while the message travels.
    handle.wait()
    report(f"rank {rank}: {numbers.tolist()} -> {total.tolist()} by async_op")


def show_barrier(rank):
    """Let rank 0 reach a barrier half a second late, and print how long each rank waits."""
    if rank == 0:
        time.sleep(0.5)
    start = time.perf_counter()
    dist.barrier()  # NEW: it returns when all ranks have called it; it carries no data of yours
    seconds = time.perf_counter() - start
    report(f"rank {rank}: {seconds:.1f} s at a barrier (rank 0 came late)")


def add_flags(parser):
    """Add the flags that only this lesson has: none."""


# ---------- Unchanged from blocking_p2p.py ----------
# You know what follows: join(), report() and main(). If you copy this lesson, copy it, too.


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
        # Each rank makes this call. From then on, they can send each other messages.
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
