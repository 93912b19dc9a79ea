"""Non-blocking point-to-point messages: isend, irecv, and a ring that sums tensors.

On CPUs, send and recv block: Python waits for the other rank. isend and irecv only start a message.
Each of them returns a request at once, so Python can compute while the message is on its way.
request.wait() blocks until the message is complete. Until then, do not change the tensor that you
send, and do not read the buffer that you receive into.

The second part of this lesson is an all-reduce: each rank starts with a tensor, and in the end
every rank has the sum of all these tensors. One way to do it is a ring, in which each rank sends to
its right neighbour and receives from its left one. playground/pictures.md draws it with four ranks.

Run it:
    python playground/nonblocking_p2p.py         # two processes, started by this script
    python playground/nonblocking_p2p.py -g 4    # a ring of four

It runs on two nodes in the same way as blocking_p2p.py.

It prints a table of the ranks. Then the ranks exchange two numbers, first with blocking calls, then
with non-blocking ones. Rank 1 sends [1.0, 1.0], and rank 0 sends [0.0, 0.0], half a second late.
Each rank multiplies matrices for half a second. On CPUs (the numbers of products will differ, and
are far lower if the cores have other work):
    blocking, rank 0: [-1.0, -1.0] -> [1.0, 1.0] in 1.0 s, 0.5 s of it idle, 25,491 products
    blocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0] in 1.0 s, 0.5 s of it idle, 25,630 products
    rank 0 |zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzcccccccccccccccccccccccccccccc|
    rank 1 |rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrcccccccccccccccccccccccccccccc|
    nonblocking, rank 0: [-1.0, -1.0] -> [1.0, 1.0] in 1.0 s, 0.5 s of it idle, 25,604 products
    nonblocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0] in 0.5 s, 0.0 s of it idle, 25,611 products
    rank 0 |zzzzzzzzzzzzzzzzzzzzzzzzzzzzzzcccccccccccccccccccccccccccccc|
    rank 1 |cccccccccccccccccccccccccccccc..............................|
    ring, rank 0: [0.0, 1.0, 2.0, 3.0, 4.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], = dist.all_reduce: True
    ring, rank 1: [0.0, 2.0, 4.0, 6.0, 8.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], = dist.all_reduce: True

The lists are the receive buffer before and after, or the tensor that is added up. With blocking
calls, rank 1 first waits in recv (r), and then computes (c). With non-blocking calls, it computes
while it waits. All time except the half second of computing is idle, so the sleep of rank 0 (z) is
idle, too. Other letters are s (in send) and w (in wait()), and a dot is anything else, such as
having finished.

Try breaking it, in a copy (cp playground/nonblocking_p2p.py playground/broken.py):
  1. In `nonblocking`, write `mine.fill_(9)` on the line after `start_exchange(...)`. Which rank
     receives the 9s, and why?

Now write it yourself: ring_all_reduce.py in playground/exercises/. One program there has a fault:
fault_newer_parameters.py.

The next lesson, collectives.py, shows the calls that all ranks make together.
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


def start_exchange(mine, theirs, right, left):
    """Start to send `mine` to the right and to receive `theirs` from the left. Returns requests."""
    operations = [dist.P2POp(dist.isend, mine, right), dist.P2POp(dist.irecv, theirs, left)]
    # NEW: both operations start together, and this function waits for neither of them.
    return dist.batch_isend_irecv(operations)


def blocking(rank, mine, theirs, right, left):
    """Exchange with send and recv, then compute. Returns the number of matrix products."""
    if rank % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(theirs, src=left)
    else:  # an odd rank receives first, because otherwise all ranks would wait in send
        dist.recv(theirs, src=left)
        dist.send(mine, dst=right)
    return work(mine.device)


def nonblocking(rank, mine, theirs, right, left):
    """Start the exchange, then compute, then wait. Returns the number of matrix products."""
    requests = start_exchange(mine, theirs, right, left)
    products = work(mine.device)  # NEW: the messages travel while this rank computes
    for request in requests:
        # On a GPU, wait() does not block Python. It adds the wait to the GPU's queue of work (its
        # CUDA stream), so what Python adds afterwards runs after the message.
        request.wait()
    # NEW: all requests are complete, so `mine` may be changed and `theirs` may be read.
    return products


def ring_all_reduce(tensor):
    """Replace a tensor with its sum over all ranks, with messages between neighbours only.

    The tensor must be contiguous. With n ranks, it is split into n chunks. In each step, every rank
    sends one chunk to the right. In the first n - 1 steps (the reduce-scatter), the receiver adds
    it to its own chunk, and sends this partial sum in the next step. After them, each chunk is
    complete on one rank: rank r has the sum in chunk r + 1 (modulo n). In n - 1 more steps (the
    all-gather), the complete chunks travel around the ring to all ranks. Here are three ranks with
    three chunks each. All chunks of rank 0 start as a, those of rank 1 as b, and those of rank 2 as
    c, and sum is a+b+c:

                              rank 0              rank 1              rank 2
        chunk                 0    1    2         0    1    2         0    1    2
        at the start          a    a    a         b    b    b         c    c    c
        reduce-scatter, 1     a    a    a+c       a+b  b    b         c    b+c  c
        reduce-scatter, 2     a    sum  a+c       a+b  b    sum       sum  b+c  c
        all-gather, 1         sum  sum  a+c       a+b  sum  sum       sum  b+c  sum
        all-gather, 2         sum  sum  sum       sum  sum  sum       sum  sum  sum

    A rank sends 2(n-1) chunks, and each is about 1/n of the tensor. So it sends at most about twice
    the tensor, however many ranks there are.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    # NEW: the chunks are views into the tensor. Some are one number longer than others, and some
    # are empty if there are more ranks than numbers.
    chunks = tensor.view(-1).tensor_split(world_size)
    # NEW: reduce-scatter. In step 0, rank r sends chunk r. In each later step it sends the chunk to
    # which it has just added: the receive_index of a step is the send_index of the next one.
    for step in range(world_size - 1):
        send_index = (rank - step) % world_size
        receive_index = (rank - step - 1) % world_size
        received = torch.empty_like(chunks[receive_index])
        for request in start_exchange(chunks[send_index], received, right, left):
            request.wait()
        chunks[receive_index].add_(received)
    # NEW: all-gather. Rank r begins with chunk r + 1, which it has just completed. Each rank
    # replaces its chunk with the sum that it receives.
    for step in range(world_size - 1):
        send_index = (rank - step + 1) % world_size
        receive_index = (rank - step) % world_size
        for request in start_exchange(chunks[send_index], chunks[receive_index], right, left):
            request.wait()


def work(device):
    """Multiply matrices for half a second. Returns how many products were computed."""
    matrix = torch.ones(32, 32, device=device)
    products = 0
    end = now(device) + 0.5
    while now(device) < end:
        matrix @ matrix
        products += 1
    return products


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
    """Exchange numbers with and without blocking, then add numbers up in a ring."""
    rank, device = join(local_rank, args)
    world_size = dist.get_world_size()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    # Connects each pair of neighbours, which takes NCCL a while the first time.
    ring_all_reduce(torch.zeros(world_size, device=device))
    for exchange in (blocking, nonblocking):
        mine = torch.full((2,), float(rank), device=device)
        theirs = torch.full((2,), -1.0, device=device)
        before = theirs.tolist()
        with Calls(computing=work) as calls:  # notes when this rank is in which call
            start = now(device)
            if rank == 0:
                time.sleep(0.5)
            products = exchange(rank, mine, theirs, right, left)
            seconds = now(device) - start
        idle = seconds - 0.5  # each rank computes for half a second
        times = f"{seconds:.1f} s, {idle:.1f} s of it idle, {products:,} products"
        report(f"{exchange.__name__}, rank {rank}: {before} -> {theirs.tolist()} in {times}")
        calls.show()
    numbers = torch.arange(5.0, device=device) * (rank + 1)
    before = numbers.tolist()
    expected = numbers.clone()
    dist.all_reduce(expected)
    ring_all_reduce(numbers)
    equal = numbers.equal(expected)
    report(f"ring, rank {rank}: {before} -> {numbers.tolist()}, = dist.all_reduce: {equal}")
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
    if args.nodes * args.gpus < 2:
        parser.error("a message needs two processes: use -g 2")
    meet(args)  # guard rail: finds the other nodes
    # Calls talk(0, args), talk(1, args) and so on, each in a process of its own.
    mp.spawn(talk, (args,), args.gpus)


if __name__ == "__main__":
    main()
