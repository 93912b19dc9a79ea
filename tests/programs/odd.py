"""Two ranks that do what few scripts do, and watch.py in front of them: python odd.py WHAT.

torchrun starts the ranks. Each function is what they do after they have joined the group.
"""

import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, steps=9):
    """Train with DDP."""
    model = nn.Linear(8, 4)
    if "compiled" in sys.argv:
        model = torch.compile(model, backend="eager")
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(8, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def thread(rank):
    """Another thread makes the steps, as below Ray."""
    other = threading.Thread(target=train, args=[rank])
    other.start()
    other.join()


def compiled(rank):
    """torch.compile makes one graph, and none of the tool."""
    train(rank)
    counters = torch._dynamo.utils.counters["stats"]
    print(f"graphs: {counters['unique_graphs']}")


def profiles(rank):
    """It records itself, from the second step on."""
    dist.barrier()  # otherwise a rank may end while the other one still connects to it
    once = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(schedule=once) as own:
        for _ in range(5):
            torch.ones(2).add(1)
            own.step()
    print("adds:", sum(each.count for each in own.key_averages() if each.key == "aten::add"))


def others(rank):
    """Threads of a pool send, which is left to Python to end."""
    pool = ThreadPoolExecutor(1)
    for _ in range(4):
        pool.submit(dist.all_reduce, torch.ones(3)).result()
    dist.barrier()


def two_groups(rank):
    """Rank 1 leaves out a call in the second of two groups, in another thread."""
    groups = [dist.new_group(), dist.new_group()]
    pool = ThreadPoolExecutor(1)
    dist.all_reduce(torch.ones(3), group=groups[0])
    pool.submit(wait if rank else dist.all_reduce, torch.ones(3), group=groups[1]).result()


def wait(tensor, group):
    """Wait for years."""
    time.sleep(9999)


def goes_on(rank):
    """The main thread ends, and another one goes on."""
    threading.Thread(target=train, args=[rank]).start()


def exits(rank):
    """Rank 1 ends without a word."""
    train(rank, 3)
    if rank == 1:
        os._exit(5)
    dist.barrier()


def exits_in_thread(rank):
    """A thread ends rank 1."""
    if rank == 1:
        threading.Thread(target=lambda: os._exit(5)).start()
        time.sleep(9999)
    dist.barrier()


def ended(rank):
    """Rank 1 is killed, and rank 0 has left the group before."""
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        time.sleep(2)
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    """Join the group, and do it."""
    what = sys.argv[1]
    if what == "execs" and "AGAIN" not in os.environ:
        os.environ["AGAIN"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    dist.init_process_group("gloo")
    globals().get(what, train)(dist.get_rank())
    if what != "goes_on":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
