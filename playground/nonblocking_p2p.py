"""Non-blocking point-to-point: isend and irecv, working while a message flies, and a ring over all ranks.

isend and irecv come back at once with a request. The message travels on its own, while this process works. Until
request.wait() has come back the buffer belongs to the message: don't change what you send, don't read what you receive.
The ring passes chunks of a tensor around until each rank has the sum of all: this is the all-reduce that
manual_data_parallel.py averages gradients with, made from nothing but messages between neighbours.

    python playground/nonblocking_p2p.py          # two processes, started by this script
    python playground/nonblocking_p2p.py -g 4     # a ring of four
    python playground/nonblocking_p2p.py -n 2 -g 1 -nr 0 -ip <ip of node 0>    # rank 0 here, and on node 1 with -nr 1
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=<ip> MASTER_PORT=8888 python playground/nonblocking_p2p.py    # by hand, rank 0
    RANK=1 WORLD_SIZE=2 MASTER_ADDR=<ip> MASTER_PORT=8888 python playground/nonblocking_p2p.py    # and rank 1

It prints who is who, and then, as rank 0 comes half a second late and all work for half a second:

    blocking, rank 0: [-1.0, -1.0] -> [1.0, 1.0] in 1.0 s, 0.5 s of it not working, 1612 matrix products
    blocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0] in 1.0 s, 0.5 s of it not working, 1598 matrix products
    nonblocking, rank 0: [-1.0, -1.0] -> [1.0, 1.0] in 1.0 s, 0.5 s of it not working, 1604 matrix products
    nonblocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0] in 0.5 s, 0.0 s of it not working, 1611 matrix products
    ring, rank 0: [0.0, 1.0, 2.0, 3.0, 4.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], as dist.all_reduce: True
    ring, rank 1: [0.0, 2.0, 4.0, 6.0, 8.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], as dist.all_reduce: True

Break it, in a copy:
  1. Fill `mine` with 9s before the wait: rank 0, who is late, gets 9s from its neighbour.
  2. Leave out the isend, run with --timeout 10: all wait in vain.
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
    dist.all_gather_object(lines, line)
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)


def work(device):
    """Multiply matrices for half a second, which needs no message. Returns how often."""
    matrix, products, end = torch.ones(128, 128, device=device), 0, now(device) + 0.5
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

    The tensor is cut into world_size chunks. In world_size - 1 steps every rank adds what it receives to one more chunk
    and passes that on; then each has one finished chunk, and world_size - 1 more steps take those around.
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
    right, left = (rank + 1) % args.world_size, (rank - 1) % args.world_size
    try:
        for exchange in (blocking, nonblocking):
            mine, theirs = torch.full((2,), float(rank), device=device), torch.full((2,), -1.0, device=device)
            before, start = theirs.tolist(), now(device)
            time.sleep(0.5 if rank == 0 else 0)  # rank 0 comes half a second late
            products = exchange(rank, mine, theirs, right, left)
            seconds = now(device) - start
            times = f"{seconds:.1f} s, {seconds - 0.5:.1f} s of it not working, {products} matrix products"
            report(f"{exchange.__name__}, rank {rank}: {before} -> {theirs.tolist()} in {times}")
        numbers = torch.arange(5.0, device=device) * (rank + 1)
        before, expected = numbers.tolist(), numbers.clone()
        dist.all_reduce(expected)
        ring_all_reduce(numbers)
        equal = torch.equal(numbers, expected)
        report(f"ring, rank {rank}: {before} -> {numbers.tolist()}, as dist.all_reduce: {equal}")
        dist.barrier()  # leave together
    finally:
        dist.destroy_process_group()
    os._exit(0)  # not through Python's shutdown, during which a thread of gloo may abort


def main():
    """Start the ranks of this node and wait for them. One that fails ends them all, with one line."""
    parser = flags(__doc__, training=False)
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
