"""Collectives: calls that all ranks make together, and what each rank holds before and after.

Each of n ranks has a buffer of n numbers, cut into n chunks: chunk r belongs to rank r. That is how later lessons share
out a model. All ranks must call the same collectives, in the same order, with tensors of the same size.

    python playground/collectives.py          # two processes, started by this script
    python playground/collectives.py -g 3     # any number; several nodes and by hand as in blocking_p2p.py

It prints who is who, and a table for each collective:

    reduce_scatter: Each rank gets its chunk of the sum over all ranks; each sends (n-1)/n S.
    rank 0: [10.0, 11.0] -> [30.0], sends 4 bytes
    rank 1: [20.0, 21.0] -> [32.0], sends 4 bytes

A buffer has S bytes, a chunk S/n. Bytes are those of a ring, as in nonblocking_p2p.py; of scatter, gather, all_to_all
if chunks go straight to who wants them. all_reduce takes 2(n-1)/n S from each rank: less than 2 S, however many there
are. gloo and NCCL may take other routes. Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md

Break it, in a copy, and run it with --timeout 5. Then put TORCH_DISTRIBUTED_DEBUG=DETAIL in front of the command, which
makes PyTorch compare the ranks' calls:
  1. A rank that skips one: in all_reduce write `if rank == 0:` before the call. Who waits, and for whom?
  2. Another order: in all_reduce make `ones = torch.ones_like(mine)`. Let rank 0 all-reduce `mine` and then `ones`, the
     others `ones` and then `mine`. What is the sum now, and who complains?
  3. Another size: let rank 0 give only `mine[:1]`, first in broadcast, then in all_reduce. Which of them do you notice?
"""

import argparse
import os
import sys
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


# NEW: one collective each; it returns what this rank holds afterwards, and how many chunks it sends on a ring
def broadcast(mine, rank, n):
    """Rank 0's numbers go to all; each rank but the last passes them on, S bytes."""
    dist.broadcast(mine, src=0)
    return mine, n if rank < n - 1 else 0


def scatter(mine, rank, n):
    """Each rank gets its chunk of rank 0's numbers; rank 0 sends (n-1)/n S."""
    chunk = torch.empty_like(mine[:1])
    dist.scatter(chunk, list(mine.chunk(n)) if rank == 0 else None, src=0)
    return chunk, n - 1 if rank == 0 else 0


def gather(mine, rank, n):
    """Rank 0 gets each rank's own chunk; the others send S/n."""
    whole = torch.empty_like(mine) if rank == 0 else mine[:0]
    dist.gather(mine.chunk(n)[rank], list(whole.chunk(n)) if rank == 0 else None, dst=0)
    return whole, 1 if rank > 0 else 0


def all_gather(mine, rank, n):
    """All ranks get each rank's own chunk; each sends (n-1)/n S."""
    whole = torch.empty_like(mine)
    dist.all_gather_single(whole, mine.chunk(n)[rank])  # older name: all_gather_into_tensor; all_gather wants a list
    return whole, n - 1


def reduce(mine, rank, n):
    """Rank 0 gets the sum over all ranks; each other rank adds its numbers and passes them on, S bytes."""
    dist.reduce(mine, dst=0)  # op=dist.ReduceOp.MAX, .MIN, .PRODUCT, ... in place of the sum
    return mine if rank == 0 else mine[:0], n if rank > 0 else 0  # what is left in the others' buffers is undefined


def reduce_scatter(mine, rank, n):
    """Each rank gets its chunk of the sum over all ranks; each sends (n-1)/n S."""
    chunk = torch.empty_like(mine[:1])
    dist.reduce_scatter_single(chunk, mine)  # older name: reduce_scatter_tensor; reduce_scatter wants a list
    return chunk, n - 1


def all_to_all(mine, rank, n):
    """Rank r gets chunk r of each rank, as if rows became columns; each sends (n-1)/n S."""
    whole = torch.empty_like(mine)
    dist.all_to_all_single(whole, mine)
    return whole, n - 1


def all_reduce(mine, rank, n):
    """All ranks get the sum over all ranks; each sends 2(n-1)/n S."""
    dist.all_reduce(mine)
    return mine, 2 * (n - 1)


def talk(local_rank, args):
    """Show each collective as a table, then an all_reduce that is made of two others."""
    rank, device = join(local_rank, args)
    n = dist.get_world_size()
    numbers = torch.arange(float(n), device=device) + 10 * (rank + 1)  # rank 0: 10, 11, ...; rank 1: 20, 21, ...
    before = f"rank {rank}: {numbers.tolist()}"
    for collective in (broadcast, scatter, gather, all_gather, reduce, reduce_scatter, all_to_all, all_reduce):
        after, chunks = collective(numbers.clone(), rank, n)
        sent = f"sends {chunks * numbers.nbytes // n} bytes"
        report(f"{before} -> {after.tolist()}, {sent}", [f"{collective.__name__}: {collective.__doc__}"])
    chunk, whole = reduce_scatter(numbers, rank, n)[0], torch.empty_like(numbers)
    dist.all_gather_single(whole, chunk)  # NEW: every chunk of the sum, each from the rank that has it
    total, _ = all_reduce(numbers, rank, n)
    line = f"{before} -> {chunk.tolist()} -> {whole.tolist()}, as all_reduce: {whole.equal(total)}"
    report(line, ["reduce_scatter, then all_gather: what all_reduce is made of"])
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
    meet(args)  # guard rail
    if "RANK" in os.environ:
        talk(0, args)
    else:
        mp.spawn(talk, (args,), args.gpus)  # talk(0, args), talk(1, args), ... each in a process of its own


if __name__ == "__main__":
    with explained():  # guard rail
        main()
