r"""torchrun starts the ranks, and tells each of them its rank in environment variables.

torchrun comes with PyTorch. It starts the processes of a node, and it sets variables in the
environment of each process. init_process_group() reads four of them by itself: RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT. The lesson reads two more: LOCAL_RANK selects the GPU, and GROUP_RANK
is the number of the node. So this lesson starts no processes, and it has no flags for nodes,
processes or addresses.

Run it on one node (--standalone makes torchrun choose a free port):
    torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_torchrun.py

Run it on two nodes, with the same command on both (run/torchrun_node.sh adds checks to it). Here
"rdzv" is short for rendezvous. "c10d" is PyTorch's own rendezvous, which needs no other server. It
numbers the nodes, so rank 0, whose output is shown, may be on either of them:
    torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d \
        --rdzv-endpoint <ip of node 0>:29500 playground/distributed_data_parallel_torchrun.py

Run it in a single process, without torchrun (the guard rail `check` then sets the variables):
    python playground/distributed_data_parallel_torchrun.py

It prints the table of ranks and the numbers of single_gpu.py, up to rounding (times will differ):
    epoch 1/3  loss 0.3961  train 88.27%  test 94.00%  1.12 s  53,396 images/s

torchrun may warn first that it sets OMP_NUM_THREADS to 1, so each process uses one core of a CPU.
This replaces torch.set_num_threads of the lessons before. To use more cores, put OMP_NUM_THREADS=4
in front of the command.

Try breaking it, in a copy:
  1. Write `assert rank == 0` after `rank, device = join(args)`. What does torchrun report, and what
     does it report if you also remove `@record`?

Two programs in playground/exercises/ have a fault: fault_lost_connection.py and
fault_missing_file.py.

The next lesson, distributed_data_parallel_resumable.py, resumes after a process has died.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet


def join(args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # NEW: torchrun has numbered the processes
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
    # NEW: the address, the rank and the world size come from the environment.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    node = os.environ.get("GROUP_RANK", "0")  # NEW: torchrun's number of this node
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, rank_row(node, rank, local_rank, device))
    if rank == 0:
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over the images of all ranks: the loss, the number classified correctly, the
    number of images.
    """
    model.train(optimizer is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: stops if the ranks have different flags
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model.module, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # NEW: writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags; without torchrun it sets RANK, ...
    # NEW: all ranks of a node call fetch() before there is a group. A file lock lets one of them
    # download the data, and the others find it on disk.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
