"""Blocking point-to-point: processes with a rank, send and recv, and who waits for whom.

A distributed program is one script that runs in several processes at once, on one machine (a node) or on many. Each
process has a rank, from 0 to world_size - 1, and a local rank within its node. They meet at a rendezvous, a key-value
store on node 0 or in a file, and form a process group (`join`). A backend carries its messages: gloo between CPUs,
NCCL between GPUs. Then one rank sends a tensor, and another, with a buffer of that shape and dtype, receives it. On
CPUs both calls block: recv until the numbers are here, send until the other rank receives them.

    python playground/blocking_p2p.py              # two processes, started by this script
    python playground/blocking_p2p.py -g 3         # three: the numbers go from 0 to 1 to 2
    python playground/blocking_p2p.py --deadlock
    python playground/blocking_p2p.py -n 2 -g 1 -nr 0 -ip <ip of node 0>    # rank 0 here, and on node 1 with -nr 1
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=<ip> MASTER_PORT=8888 python playground/blocking_p2p.py    # by hand, rank 0
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=<ip> MASTER_PORT=8888 python playground/blocking_p2p.py    # and rank 1
    python playground/blocking_p2p.py --init_method file:///tmp/meet    # the rendezvous is a file; or tcp://, env://

It prints who is who, and then, on CPUs (on GPUs send only puts the message into a queue):

    rank 0 comes a second late:
    rank 0: [0.0, 1.0, 2.0, 3.0] -> [0.0, 1.0, 2.0, 3.0], 0.0 s in recv, 0.0 s in send
    rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0], 1.0 s in recv, 0.0 s in send
    rank 1 comes a second late:
    rank 0: [0.0, 1.0, 2.0, 3.0] -> [0.0, 1.0, 2.0, 3.0], 0.0 s in recv, 1.0 s in send
    rank 1: [0.0, 0.0, 0.0, 0.0] -> [0.0, 1.0, 2.0, 3.0], 0.0 s in recv, 0.0 s in send

Break it, in a copy: give rank 1 a buffer of three numbers (gloo aborts); let it receive from src=1; run with -g 1.
"""

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # C++ back traces would bury the line that helps
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common.flags import flags, parse
from common.guard_rails import deadline, explain, sign_in


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


def now(device):
    """Return the time in seconds. A GPU runs behind the Python code: wait until it has done what it was told."""
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    return time.perf_counter()


def report(line):
    """Print every rank's line, in the order of the ranks."""
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)  # a collective: all ranks call it, each gets what all have given
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def relay(rank, device, late):
    """Pass four numbers from rank 0 to rank 1, on to rank 2 and so on. Rank `late` comes a second late."""
    numbers = torch.arange(4.0, device=device) if rank == 0 else torch.zeros(4, device=device)
    before = numbers.tolist()
    time.sleep(1 if rank == late else 0)
    start = now(device)
    if rank > 0:
        dist.recv(numbers, src=rank - 1)  # comes back when the numbers are here
    received = now(device)
    if rank < dist.get_world_size() - 1:
        dist.send(numbers, dst=rank + 1)  # on CPUs it comes back when they are received, on GPUs at once
    times = f"{received - start:.1f} s in recv, {now(device) - received:.1f} s in send"
    report(f"rank {rank}: {before} -> {numbers.tolist()}, {times}")


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
    elif order == "isend and irecv":  # both are only asked for (on NCCL, long messages need the next order)
        for request in [dist.isend(mine, right, group), dist.irecv(theirs, left, group)]:
            request.wait()
    else:  # the same, told to the backend at once
        operations = [dist.P2POp(dist.isend, mine, right, group), dist.P2POp(dist.irecv, theirs, left, group)]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
    return theirs.item()


def talk(local_rank, args):
    """Show who waits for whom; with --deadlock, how all can wait for each other and how not."""
    rank, device = join(local_rank, args)
    try:
        if not args.deadlock:
            for late in (0, 1):
                if rank == 0:
                    print(f"rank {late} comes a second late:", flush=True)
                relay(rank, device, late)
        else:
            impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=3))  # all ranks, in a second group
            try:
                report(f"rank {rank}: {exchange('all send first', rank, torch.device('cpu'), impatient)}")
            except RuntimeError as error:
                if not re.search("imed out|onnection", str(error)):
                    raise
                who = (rank + 1) % args.world_size
                report(f"rank {rank}: DEADLOCK: rank {who} receives only after its own send, which waits like mine")
            for order in ("even ranks send first", "isend and irecv", "batch_isend_irecv"):
                report(f"rank {rank}: {order}: received {exchange(order, rank, device)}")
        dist.barrier()  # leave together
    finally:
        dist.destroy_process_group()
    os._exit(0)  # not through Python's shutdown, during which a thread of gloo may abort


def main():
    """Start the ranks of this node and wait for them. One that fails ends them all, with one line."""
    parser = flags(__doc__, training=False)
    parser.add_argument("--deadlock", action="store_true", help="let all send before they receive; then three cures")
    args, ranks = parse(parser, least=2), None
    try:
        if args.nr == 0 and not args.meeting_file:  # on all addresses of this node, at a free port if --port is 0
            store = dist.TCPStore("127.0.0.1", args.port, is_master=True, wait_for_workers=False)
            args.port = store.port
        if "RANK" in os.environ:
            return talk(0, args)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks inherit it: until join() only we heed Ctrl-C
        ranks = mp.spawn(talk, (args,), args.gpus, join=False)  # talk(0, args), talk(1, args), ... in new processes
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
