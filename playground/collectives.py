"""Collectives: calls that all ranks make together, and what each rank holds before and after.

send and recv involve two ranks. A collective involves all ranks, so every rank must call it. All
ranks must also call the same collectives in the same order, with tensors of the same size.

Here each of n ranks has a tensor of n numbers, and a chunk is one number. If a collective gives
each rank one chunk, rank r gets chunk r. (The ring of nonblocking_p2p.py gave rank r chunk r + 1.)

Run it:
    python playground/collectives.py         # two processes, started by this script
    python playground/collectives.py -g 3    # any number of processes

It runs on two nodes in the same way as blocking_p2p.py.

It prints a table of the ranks. Then it prints for each collective what every rank holds before and
after the call:
    reduce_scatter: Each rank gets its chunk of the sum over all ranks; each rank sends n-1 chunks.
    rank 0: [10.0, 11.0] -> [30.0], sends 4 bytes
    rank 1: [20.0, 21.0] -> [32.0], sends 4 bytes

The bytes depend on the route, which gloo and NCCL choose. They are calculated for these routes:
broadcast and reduce use a chain of ranks. all_gather, reduce_scatter and all_reduce use a ring
(drawn in playground/pictures.md). The others send directly.

Try breaking it, in a copy (cp playground/collectives.py playground/broken.py). Run each
exercise with --timeout 5. Then run it again with TORCH_DISTRIBUTED_DEBUG=DETAIL in front of the
command, because PyTorch then compares the calls of the ranks.
  1. Let rank 1 skip a call: in the function all_reduce, write `if rank != 1:` before the line that
     calls dist.all_reduce. Where does each rank wait?
  2. Change the order: in all_reduce, add `ones = torch.ones_like(mine)`. Let rank 0 reduce `mine`
     and then `ones`, and the other ranks `ones` and then `mine`. What are the sums? Is there an
     error?
  3. Change the size: let rank 0 pass only `mine[:1]`, first in broadcast, then in all_reduce. Which
     of the two ends with an error?

Now write it yourself: reduce_scatter.py and all_gather.py in playground/exercises/. One program
there has a fault: fault_never_returns.py.

The next lesson, single_gpu.py, is the plain training loop that later lessons change.
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


# NEW: each of the following functions shows one collective. It returns what this rank holds after
# the call, and how many chunks this rank sends.
def broadcast(mine, rank, n):
    """All ranks get rank 0's numbers; each rank except the last sends n chunks."""
    dist.broadcast(mine, src=0)
    sent = n if rank < n - 1 else 0
    return mine, sent


def scatter(mine, rank, n):
    """Each rank gets its chunk of rank 0's numbers; rank 0 sends n-1 chunks."""
    chunk = torch.empty_like(mine[:1])
    chunks = list(mine.chunk(n)) if rank == 0 else None
    dist.scatter(chunk, chunks, src=0)
    sent = n - 1 if rank == 0 else 0
    return chunk, sent


def gather(mine, rank, n):
    """Each rank r gives its chunk r, and rank 0 gets all; the other ranks send one chunk each."""
    if rank == 0:
        whole = torch.empty_like(mine)
        chunks = list(whole.chunk(n))  # views, so gather writes into `whole`
    else:
        whole = mine[:0]  # empty, because this rank gets nothing
        chunks = None
    dist.gather(mine.chunk(n)[rank], chunks, dst=0)
    sent = 1 if rank > 0 else 0
    return whole, sent


def all_gather(mine, rank, n):
    """Each rank r gives its chunk r, and all ranks get all; each rank sends n-1 chunks."""
    whole = torch.empty_like(mine)
    # Newer versions of PyTorch also call it all_gather_single.
    dist.all_gather_into_tensor(whole, mine.chunk(n)[rank])
    return whole, n - 1


def reduce(mine, rank, n):
    """Rank 0 gets the sum over all ranks; the other ranks send n chunks each."""
    dist.reduce(mine, dst=0)  # op=dist.ReduceOp.MAX would give the maximum instead of the sum
    if rank == 0:
        return mine, 0
    return mine[:0], n  # the numbers that are left in `mine` are undefined, so they are not shown


def reduce_scatter(mine, rank, n):
    """Each rank gets its chunk of the sum over all ranks; each rank sends n-1 chunks."""
    chunk = torch.empty_like(mine[:1])
    # Newer versions of PyTorch also call it reduce_scatter_single.
    dist.reduce_scatter_tensor(chunk, mine)
    return chunk, n - 1


def all_to_all(mine, rank, n):
    """Rank r gets chunk r of each rank: rows become columns; each rank sends n-1 chunks."""
    whole = torch.empty_like(mine)
    dist.all_to_all_single(whole, mine)
    return whole, n - 1


def all_reduce(mine, rank, n):
    """All ranks get the sum over all ranks; each rank sends 2(n-1) chunks."""
    dist.all_reduce(mine)
    return mine, 2 * (n - 1)


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


def start_and_wait(numbers):
    """Add up the numbers of all ranks with async_op=True. Returns the sum."""
    total = numbers.clone()
    # NEW: each collective above takes async_op=True. It then returns a handle at once, which is
    # like the requests of isend and irecv. Until wait() returns, do not read or change `total`.
    handle = dist.all_reduce(total, async_op=True)
    # Here this rank could compute something else, while the message travels.
    handle.wait()
    return total


def wait_at_barrier(rank):
    """Let rank 0 reach a barrier half a second late. Returns the seconds that this rank waited."""
    if rank == 0:
        time.sleep(0.5)
    start = time.perf_counter()
    dist.barrier()  # NEW: it returns when all ranks have called it; it carries no data of yours
    return time.perf_counter() - start


def join(local_rank, args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    # The nodes before this one have args.gpus ranks each.
    rank = args.nr * args.gpus + local_rank
    # The shell sets LOCAL_RANK if each rank is started by hand (see main).
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


def report(line):
    """Print one line from each rank, in the order of the ranks.

    all_gather_object is an all_gather of Python objects, which it turns into bytes and back.
    """
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


@explained  # guard rail: explains errors
def talk(local_rank, args):
    """Show each collective, an all_reduce that is made of two others, async_op and a barrier."""
    rank, device = join(local_rank, args)
    n = dist.get_world_size()
    numbers = torch.arange(float(n), device=device) + 10 * (rank + 1)  # on rank 0: 10, 11, ...
    before = numbers.tolist()
    for collective in COLLECTIVES:
        after, chunks = collective(numbers.clone(), rank, n)
        sent = chunks * numbers.nbytes // n
        if rank == 0:
            print(f"{collective.__name__}: {collective.__doc__}", flush=True)
        report(f"rank {rank}: {before} -> {after.tolist()}, sends {sent} bytes")
    chunk, _ = reduce_scatter(numbers, rank, n)
    whole = torch.empty_like(numbers)
    # NEW: each rank sends its chunk of the sum, so all ranks have the whole sum.
    dist.all_gather_into_tensor(whole, chunk)
    total, _ = all_reduce(numbers.clone(), rank, n)
    equal = whole.equal(total)
    if rank == 0:
        print("reduce_scatter, then all_gather: together they are an all_reduce", flush=True)
    report(f"rank {rank}: {before} -> {chunk.tolist()} -> {whole.tolist()}, = all_reduce: {equal}")
    total = start_and_wait(numbers)
    report(f"rank {rank}: {before} -> {total.tolist()} by async_op")
    report(f"rank {rank}: {wait_at_barrier(rank):.1f} s at a barrier (rank 0 came late)")
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
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    if "RANK" in os.environ:
        # This rank was started by hand, so it counts as a node of its own, with one process.
        args.nodes = int(os.environ["WORLD_SIZE"])
        args.gpus = 1
        args.nr = int(os.environ["RANK"])
        args.init_method = "env://"  # the address is in MASTER_ADDR and MASTER_PORT
    meet(args)  # guard rail: finds the other nodes
    # Calls talk(0, args), talk(1, args) and so on, each in a process of its own.
    mp.spawn(talk, (args,), args.gpus)


if __name__ == "__main__":
    main()
