"""Non-blocking messages: compute while a message is on its way, and add tensors up in a ring.

Run it:
    python playground/nonblocking_p2p.py    # two processes; -g 4: a ring of four

Each rank sends two numbers and computes for a second, and rank 0 starts half a second late. After a
table of the ranks, it prints on CPUs (each list is the receive buffer, and in the ring the rank's
tensor, before and after):
    blocking, rank 0: [-1.0, -1.0] -> [1.0, 1.0], waited 0.0 s, 1.0 s in all
    blocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0], waited 0.5 s, 1.5 s in all
    nonblocking, rank 0: [-1.0, -1.0] -> [1.0, 1.0], waited 0.0 s, 1.0 s in all
    nonblocking, rank 1: [-1.0, -1.0] -> [0.0, 0.0], waited 0.0 s, 1.0 s in all
    ring, rank 0: [0.0, 1.0, 2.0, 3.0, 4.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], all_reduce agrees: True
    ring, rank 1: [0.0, 2.0, 4.0, 6.0, 8.0] -> [0.0, 3.0, 6.0, 9.0, 12.0], all_reduce agrees: True

`isend` and `irecv` only start a message. Each returns a request at once, and `request.wait()`
blocks until the message is complete. So rank 1 computes while it would otherwise wait for rank 0
(drawn in `playground/figures/waits.png`). In the ring, each rank passes numbers to its right
neighbour until all ranks have the sum of their tensors, which is called an all-reduce
(`playground/figures/ring.png`).

On CPUs no rank blocks, so all of them may send first, which was a deadlock in `blocking_p2p.py`.
`batch_isend_irecv` starts several messages together, which is safe with NCCL, too:
    python playground/nonblocking_p2p.py --deadlock
    rank 0: isend and irecv: received 1
    rank 1: isend and irecv: received 0
    rank 0: batch_isend_irecv: received 1
    rank 1: batch_isend_irecv: received 0

Read the code down to the line "Unchanged from blocking_p2p.py". The rest is that lesson's, word for
word, and it runs on two nodes in the same way.

Try breaking it, in a copy (cp playground/nonblocking_p2p.py playground/broken.py):
  1. In `nonblocking`, write `mine.fill_(9)` below `start_exchange(...)`. Which rank gets the 9s?
Now write `ring_all_reduce.py`, and repair `fault_newer_parameters.py`, in playground/exercises/.
Builds on: blocking_p2p.py
The next lesson, `collectives.py`, shows the calls that all ranks make together.
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


def start_exchange(mine, theirs, right, left):
    """Start to send `mine` to the right and to receive `theirs` from the left. Returns requests."""
    # NEW: a P2POp describes a message, and batch_isend_irecv starts them all, without waiting.
    to_right = dist.P2POp(dist.isend, mine, right)
    from_left = dist.P2POp(dist.irecv, theirs, left)
    return dist.batch_isend_irecv([to_right, from_left])


def nonblocking(mine, theirs, right, left):
    """Start the exchange, compute, and only then wait. Returns the seconds of waiting."""
    requests = start_exchange(mine, theirs, right, left)
    compute(mine.device)  # NEW: meanwhile the messages travel, so leave `mine` and `theirs` alone
    start = time.perf_counter()
    for request in requests:
        request.wait()  # NEW: on CPUs, blocks until the message is complete
    theirs.tolist()  # a GPU's wait() returns at once, but reading the numbers waits
    return time.perf_counter() - start


def blocking(mine, theirs, right, left):
    """Exchange as in blocking_p2p.py, and then compute. Returns the seconds of waiting."""
    start = time.perf_counter()
    if dist.get_rank() % 2 == 0:
        dist.send(mine, dst=right)
        dist.recv(theirs, src=left)
    else:
        dist.recv(theirs, src=left)
        dist.send(mine, dst=right)
    theirs.tolist()  # waits for a GPU
    waited = time.perf_counter() - start
    compute(mine.device)
    return waited


def talk(local_rank, args):
    """As one of the ranks, exchange numbers in two ways, and then add numbers up in a ring."""
    rank, device = join(local_rank, args)
    right = (rank + 1) % dist.get_world_size()
    left = (rank - 1) % dist.get_world_size()
    if args.deadlock:
        show_cures(rank, device, right, left)
    else:
        for exchange in (blocking, nonblocking):
            show_waiting(exchange, rank, device, right, left)
        show_ring(rank, device)
    dist.destroy_process_group()


def ring_all_reduce(tensor):
    """Replace a contiguous tensor with its sum over all ranks, by messages between neighbours.

    With n ranks, the tensor is split into n chunks, and in each step every rank sends one chunk to
    the right. First the chunks are added up (reduce-scatter), and then the sums are passed on
    (all-gather). Here are three ranks, whose chunks start as a on rank 0, b on rank 1 and c on rank
    2. So a+c is the sum of a chunk on ranks 0 and 2:

                              rank 0              rank 1              rank 2
        chunk                 0    1    2         0    1    2         0    1    2
        at the start          a    a    a         b    b    b         c    c    c
        reduce-scatter, 1     a    a    a+c       a+b  b    b         c    b+c  c
        reduce-scatter, 2     a    sum  a+c       a+b  b    sum       sum  b+c  c
        all-gather, 1         sum  sum  a+c       a+b  sum  sum       sum  b+c  sum
        all-gather, 2         sum  sum  sum       sum  sum  sum       sum  sum  sum

    Each rank sends 2(n-1) chunks of about 1/n of the tensor: at most about twice the tensor,
    however many ranks there are.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    right = (rank + 1) % world_size
    left = (rank - 1) % world_size
    chunks = tensor.view(-1).tensor_split(world_size)  # views into the tensor
    # NEW: reduce-scatter. Rank r sends chunk r first, and then always the chunk to which it has
    # just added: the receive_index of a step is the send_index of the next one.
    for step in range(world_size - 1):
        send_index = (rank - step) % world_size
        receive_index = (rank - step - 1) % world_size
        received = torch.empty_like(chunks[receive_index])
        for request in start_exchange(chunks[send_index], received, right, left):
            request.wait()
        chunks[receive_index].add_(received)
    # NEW: all-gather. Chunk r + 1 of rank r is now complete, and it is sent first. A chunk that
    # arrives is complete, too, and replaces the rank's own.
    for step in range(world_size - 1):
        send_index = (rank - step + 1) % world_size
        receive_index = (rank - step) % world_size
        for request in start_exchange(chunks[send_index], chunks[receive_index], right, left):
            request.wait()


def isend_and_irecv(mine, theirs, right, left):
    """Do what start_exchange does, with two calls. (NCCL's isend may wait: a deadlock again.)"""
    to_right = dist.isend(mine, dst=right)
    from_left = dist.irecv(theirs, src=left)
    return [to_right, from_left]


def compute(device):
    """Multiply matrices for a second."""
    matrix = torch.ones(32, 32, device=device)
    end = time.perf_counter() + 1
    while time.perf_counter() < end:
        (matrix @ matrix).sum().item()  # reading a number makes Python wait for a GPU


def show_waiting(exchange, rank, device, right, left):
    """Exchange two numbers while rank 0 starts half a second late. Print how long a rank waits."""
    mine = torch.full((2,), float(rank), device=device)
    theirs = torch.full((2,), -1.0, device=device)
    before = theirs.tolist()
    if rank == 0:
        time.sleep(0.5)
    start = time.perf_counter()
    waited = exchange(mine, theirs, right, left)
    seconds = time.perf_counter() - start
    times = f"waited {waited:.1f} s, {seconds:.1f} s in all"
    report(f"{exchange.__name__}, rank {rank}: {before} -> {theirs.tolist()}, {times}")


def show_ring(rank, device):
    """Add numbers up in a ring, and compare with PyTorch's all_reduce."""
    numbers = torch.arange(5.0, device=device) * (rank + 1)
    before = numbers.tolist()
    expected = numbers.clone()
    dist.all_reduce(expected)
    ring_all_reduce(numbers)
    equal = numbers.equal(expected)
    report(f"ring, rank {rank}: {before} -> {numbers.tolist()}, all_reduce agrees: {equal}")


def show_cures(rank, device, right, left):
    """Let all ranks send first, with calls that do not block."""
    cures = {"isend and irecv": isend_and_irecv, "batch_isend_irecv": start_exchange}
    if dist.get_backend() == "nccl":
        del cures["isend and irecv"]
    for name, start in cures.items():
        mine = torch.tensor([rank], device=device)
        theirs = torch.tensor([-1], device=device)
        for request in start(mine, theirs, right, left):
            request.wait()
        report(f"rank {rank}: {name}: received {theirs.item()}")


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.add_argument("--deadlock", action="store_true", help="let all ranks send first")


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
