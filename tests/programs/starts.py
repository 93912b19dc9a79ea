"""Two ranks that start in different ways, and what rank 1 does: python starts.py HOW WHAT PORT."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, what):
    """Train with DDP. Rank 1 may leave out a message or steps, or be killed."""
    model = DistributedDataParallel(nn.Linear(40, 30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        if what == "killed" and rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "fewer" and rank == 1 and step == 6:
            break
        loss = model(torch.ones(4, 40)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if what == "left out" and not (rank == 1 and step == 4):
            dist.all_reduce(torch.ones(2))


def be_a_rank(rank, what, port):
    """Join the group, and train."""
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", where, rank=rank, world_size=2)
    train(rank, what)
    dist.destroy_process_group()


def main():
    """Start the ranks."""
    how, *rest = sys.argv[1:]
    if how == "mpirun":
        be_a_rank(int(os.environ["OMPI_COMM_WORLD_RANK"]), *rest)
    elif how in ("0", "1"):
        be_a_rank(int(how), *rest)
    elif how == "subprocess":
        command = [sys.executable, __file__]
        ranks = [subprocess.Popen([*command, str(rank), *rest]) for rank in range(2)]
        for each in ranks:
            each.wait()
    elif how == "os.fork":
        ranks = [os.fork()]
        if ranks[0]:
            ranks.append(os.fork())
        if not all(ranks):
            be_a_rank(len(ranks) - 1, *rest)
            sys.exit()
        with contextlib.suppress(ChildProcessError):
            while os.wait():  # all children: the tool is none
                pass
    else:
        context = multiprocessing.get_context(how)
        ranks = [context.Process(target=be_a_rank, args=(rank, *rest)) for rank in range(2)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()


if __name__ == "__main__":
    main()
