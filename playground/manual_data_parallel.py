"""Data parallelism by hand: every rank has a copy of the model and a part of each batch.

Three things make several processes train like a single one:

  - They start with the same model, because rank 0 sends its parameters to all ranks (send_weights).
  - The global batch is all images of one step. Each rank computes the gradients for its own part of
    it. A sampler chooses the parts.
  - Before each step the ranks average their gradients (average_gradients). Each rank has its own
    optimizer, but all of them take the same step. So the copies of the model stay equal.

A single process would take the same step. The loss is a mean over images, and all parts have the
same size. So the mean of the ranks' gradients is the gradient of the global batch.

Run it:
    python playground/manual_data_parallel.py -g 2             # two processes
    python playground/manual_data_parallel.py -g 2 --bucket    # all gradients in one message
    python playground/manual_data_parallel.py -g 2 --bucket --model cnn

Run it on two nodes, each command on its own node:
    python playground/manual_data_parallel.py -n 2 -g 2 -nr 0 -ip <ip of node 0>
    python playground/manual_data_parallel.py -n 2 -g 2 -nr 1 -ip <ip of node 0>

It prints (process ids, host and times will differ):
    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  6.58 s  9,102 images/s

These are the numbers of single_gpu.py, for any number of processes that divides --batch_size. Only
the last digits differ, because float32 sums depend on the order of addition. With --double, all
twelve digits of the loss agree.

With so small a network, messages take longer than computing. On 2 cores, an epoch took 6.5 s, with
--bucket 2.0 s, and 0.6 s in single_gpu.py. But with DDP and one thread in each process, two trained
the CNN 2.1 times as fast as one (playground/measured.md).

Try breaking it, in a copy (cp playground/manual_data_parallel.py playground/broken.py):
  1. Comment out `send_weights(model)` in train. Do all ranks train the same model? Compare the
     losses with those of single_gpu.py.
  2. Comment out `average(model)` in run_epoch. Which model does each rank train? Compare the
     losses.

Now write it yourself: average_gradients.py in playground/exercises/. Three programs there have a
fault: fault_different_models.py, fault_wrong_gradient.py and fault_mixed_gradients.py.

The next lesson, overlapped_data_parallel.py, sends gradients while backward() computes others.
"""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import old_flags as flags
from common.data import fetch, load, whole_batch
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet


def send_weights(model):
    """Give all ranks the parameters (also called weights) of rank 0.

    A model may also have tensors that are not trained, such as the running averages of batch norm
    (PyTorch calls them buffers, too). They would have to be sent as well.
    """
    for parameter in model.parameters():
        # NEW: rank 0 sends, and the other ranks receive into their own parameters. Without
        # detach(), autograd would record this call, and backward() would warn of it.
        dist.broadcast(parameter.detach(), src=0)


def average_gradients(model):
    """Replace each gradient with its mean over the ranks, which is the global batch's gradient.

    All ranks must have gradients for the same parameters, so that they send the same messages. In
    the exercise average_gradients.py, some ranks lack some gradients.
    """
    for parameter in model.parameters():
        if parameter.grad is not None:  # a frozen parameter has none
            dist.all_reduce(parameter.grad)  # NEW: the sum over all ranks
            parameter.grad /= dist.get_world_size()


def average_in_one_bucket(model):
    """Do the same with a bucket: one tensor that contains all gradients.

    Each message has a fixed cost, so one long message takes less time than many short ones.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, bucket.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


def join(local_rank, args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    rank = args.nr * args.gpus + local_rank
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
        cores = max(1, torch.get_num_threads() // args.gpus)
        torch.set_num_threads(cores)  # NEW: the ranks of a node divide its cores among themselves
    dist.init_process_group(
        backend,
        init_method=f"tcp://{args.ip}:{args.port}",  # rank 0 listens there
        rank=rank,
        world_size=args.nodes * args.gpus,
        timeout=timedelta(seconds=args.timeout),  # for the start, and for each collective
        device_id=gpu,
    )
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, rank_row(args.nr, rank, local_rank, device))
    if rank == 0:
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def run_epoch(model, loader, device, optimizer=None, average=None):
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
            average(model)  # NEW: from here on, all ranks have the gradient of the global batch
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)  # NEW: the sums over all ranks
    return sums.tolist()


@explained  # guard rail: explains errors
def train(local_rank, args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(local_rank, args)
    world_size = dist.get_world_size()
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    # NEW: DistributedSampler shuffles with the seed args.seed + epoch, as single_gpu.py does, and
    # the order is the same. Of n ranks, rank r gets the images at the positions r, r + n, r + 2n
    # and so on. For example, two ranks divide a first batch of four images into the positions 0, 2
    # and 1, 3. So together, the ranks always have a batch of single_gpu.py. If n does not divide
    # the number of images, the sampler's drop_last leaves out the last ones.
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size  # NEW: --batch_size is the global batch
    pin_memory = device.type == "cuda"  # a GPU copies from pinned memory while Python continues
    train_loader = DataLoader(
        train_set,
        per_rank_batch,
        sampler=sampler,
        drop_last=True,
        collate_fn=whole_batch,
        pin_memory=pin_memory,
    )
    # NEW: each test image counts once. DistributedSampler would repeat some to make the parts
    # equal. Any sequence of indices can be a sampler.
    test_indices = range(rank, len(test_set), world_size)
    test_loader = DataLoader(
        test_set, 1000, sampler=test_indices, collate_fn=whole_batch, pin_memory=pin_memory
    )
    torch.manual_seed(args.seed + rank)  # NEW: different models, so that send_weights has an effect
    model = make_model(args).to(device)
    send_weights(model)  # NEW: from here on, all ranks have the model of rank 0
    average = average_in_one_bucket if args.bucket else average_gradients
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)  # NEW: an order for each epoch, which is the same on all ranks
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer, average)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:  # NEW: one line for all ranks, not one from each
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
def main():
    """Read the flags and start the ranks of this node."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("-n", "--nodes", type=int, default=1, help="number of nodes")
    add("-g", "--gpus", type=int, help="processes on each node; default: its GPUs, or 2")
    add("-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", default="127.0.0.1", help="address of node 0")
    add("--port", type=int, default=8888, help="port of node 0; -n 1 takes a free one")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--bucket", action="store_true", help="average all gradients in one all_reduce")
    args = parser.parse_args()
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check(parser, args)  # guard rail: refuses impossible flags
    # The data is fetched once on each node, before its ranks start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    meet(args)  # guard rail: finds the other nodes
    # Calls train(0, args), train(1, args) and so on, each in a process of its own.
    mp.spawn(train, (args,), args.gpus)


if __name__ == "__main__":
    main()
