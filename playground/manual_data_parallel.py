"""Data parallelism by hand: every rank has a copy of the model and a part of each batch.

Run it:
    python playground/manual_data_parallel.py -g 2

It prints the same numbers as `single_gpu.py`, up to rounding (process ids, host and times differ):
    node  rank  local_rank  device  pid     host
    0     0     0           cpu     4242    laptop
    0     1     1           cpu     4243    laptop
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  5.08 s  11,801 images/s

The images of one step, over all ranks, are the global batch. Each rank computes the gradients for
its own part of it, and then the ranks average their gradients. If two ranks have 64 images each,
with the mean losses 2 and 4, the mean over all 128 images is 3, the mean of the means. (With 96 and
32 images it would be 2.5, and 3 would be wrong.) The same holds for gradients. So each rank's
optimizer takes the step that a single process would take (but for batch norm, which sees a rank's
images only). The copies start equal, because rank 0 sends its parameters, and they stay equal.
`playground/pages/figures/data_parallel.svg` draws a step.

Messages take longer than computing here, because the model is so small. With `--bucket`, all
gradients travel in one message, which takes less time than many short ones:
    python playground/manual_data_parallel.py -g 2 --bucket
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.07 s  55,998 images/s
`playground/tools/watch.py` shows its messages. On two nodes, it is started as `blocking_p2p.py` is.
What has changed since `single_gpu.py`:
    git diff -w --patience --no-index playground/{single_gpu,manual_data_parallel}.py

Try breaking it, in a copy (`cp playground/manual_data_parallel.py playground/broken.py`):
  1. Comment out `send_weights(model)`. Do all ranks train the same model? Compare the losses with
     those of `single_gpu.py`.
  2. Comment out `average(model)` in `run_epoch`. Which model does each rank train?
Now write it yourself: `average_gradients.py` in `playground/exercises/`.
Builds on: collectives.py
The next lesson, `distributed_data_parallel.py`, lets PyTorch do all of this.
"""

import os
import platform
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find common/ from any folder
from common import flags
from common.data import fetch, load, whole_batch
from common.models import make_model


def send_weights(model):
    """Give all ranks the parameters (also called weights) of rank 0.

    A model may also have tensors that are not trained, such as the running averages of batch norm.
    PyTorch calls them buffers, and they would have to be sent, too. What gloo sends must be
    contiguous: it ignores strides, so a column of a matrix would arrive with wrong numbers.
    """
    for parameter in model.parameters():
        # NEW: rank 0 sends, and the other ranks receive into their own parameters. detach() shares
        # the parameter's memory, and keeps autograd from recording the call.
        dist.broadcast(parameter.detach(), src=0)


def average_gradients(model):
    """Replace each gradient with its mean over the ranks, which is the global batch's gradient.

    All ranks must have gradients for the same parameters, so that they send the same messages. (The
    exercise average_gradients.py lifts this condition.)
    """
    for parameter in model.parameters():
        if parameter.grad is not None:  # a frozen parameter has none
            dist.all_reduce(parameter.grad)  # NEW: the sum over all ranks
            parameter.grad /= dist.get_world_size()


def average_in_one_bucket(model):
    """Average all gradients in one message, with a bucket: one tensor that contains them all."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(bucket)
    bucket /= dist.get_world_size()
    sizes = [gradient.numel() for gradient in gradients]
    for gradient, mean in zip(gradients, bucket.split(sizes), strict=True):
        gradient.copy_(mean.view_as(gradient))


# ---------- Mostly from blocking_p2p.py and single_gpu.py: read the lines marked NEW ----------


def main():
    """Read the flags, and start the processes of this node."""
    parser = flags.ranks(__doc__)  # --model, --dataset, --epochs, --timeout and so on
    add = parser.add_argument
    add("-n", "--nodes", type=flags.positive, default=1, help="number of nodes")
    add("-g", "--gpus", type=flags.positive, help="ranks of each node; default: its GPUs, or 2")
    add("-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", help="address of node 0")
    add("--port", type=flags.port, default=29500, help="port of node 0; one node takes a free one")
    add_flags(parser)
    args = parser.parse_args()
    parser.complete_nodes(args)  # chooses -g, and with one node a free port
    # The data is fetched once on each node, before its processes start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    if args.device == "cpu":  # hide C++ back traces; Python raises the same errors
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        # NEW: starts args.gpus processes. Each is a new Python, which imports this file, and so
        # finds the function train. Then each calls train(local_rank, args), with 0, 1 and so on.
        mp.spawn(train, (args,), args.gpus)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.exit(str(error))  # the error of the first rank that failed
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for process in mp.active_children():
            process.kill()  # no rank outlives this process


def train(local_rank, args):
    """Train as one of the ranks of this node."""
    rank, device = join(local_rank, args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed + rank)  # NEW: so that dropout, for example, differs between ranks
    model = make_model(args).to(device)
    # fused=True is faster. eps makes the lessons' digits equal: in your project, leave it out.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    send_weights(model)  # NEW: from here on, all ranks have the model of rank 0
    average = average_in_one_bucket if args.bucket else average_gradients
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args, average)
    dist.destroy_process_group()


def join(local_rank, args):
    """Join the process group (all ranks), and print a table of it. Returns the rank and device."""
    rank = args.nr * args.gpus + local_rank  # the nodes before this one have args.gpus ranks each
    world_size = args.nodes * args.gpus
    torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))  # they share the cores
    device, gpu = torch.device(args.device), None  # gpu stays None on a CPU
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    address = f"tcp://{args.ip}:{args.port}"
    try:
        # NEW: all ranks make this call, and wait in it for each other. Then they can send messages.
        dist.init_process_group(
            # the library that carries messages: NCCL between NVIDIA's GPUs, gloo between CPUs
            backend=dist.get_default_backend_for_device(device),
            init_method=address,  # the rendezvous: rank 0 waits there (listens), others connect
            world_size=world_size,  # how many ranks there are on all nodes together
            rank=rank,  # which of them this process is: no two have the same number
            timeout=timedelta(seconds=args.timeout),  # for this call, and for each later message
            device_id=gpu,  # with it, NCCL starts now, and not at the first message
        )
    except RuntimeError as error:  # ranks are missing, or do not connect, or the port is taken
        hint = f"All {world_size} ranks must connect to {address}: start every node, with the same"
        hint += " -n, -g and -ip, and the same free --port. If gloo cannot connect, export"
        error.add_note(f"{hint} GLOO_SOCKET_IFNAME=<network interface>, such as eth0.")
        raise
    row = f"{args.nr:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    everyone = [None] * world_size
    # NEW: each rank gets the objects of all ranks: a row of the table, and the flags.
    dist.all_gather_object(everyone, (row, vars(args)))
    flags.check_same([theirs for _, theirs in everyone])  # an error, if the nodes' flags differ
    if rank == 0:
        print("node  rank  local_rank  device  pid     host", flush=True)
        print(*[row for row, _ in everyone], sep="\n", flush=True)
    return rank, device


def loaders(args, rank, world_size):
    """Return a DataLoader of this rank's training images, and one of its test images."""
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    # These data sets return whole batches. Yours does not: leave collate_fn out; set num_workers.
    options = {"collate_fn": whole_batch, "pin_memory": args.device != "cpu"}
    # NEW: all ranks shuffle with one seed, into the same order. Of it, rank 0 of two takes the
    # positions 0, 2, 4 and so on, and rank 1 takes 1, 3, 5. drop_last leaves the last image out if
    # their number is odd, so that both take equally many.
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size  # NEW: --batch_size is the global batch
    # drop_last leaves out an incomplete last batch, which several ranks could not divide equally.
    train_loader = DataLoader(train_set, per_rank_batch, sampler=sampler, drop_last=True, **options)
    # NEW: each test image counts once (DistributedSampler would repeat some). The images are in
    # batches of at most 1000, and of each batch, a rank takes every world_size-th one.
    batches = torch.arange(len(test_set)).tensor_split(len(test_set) // 1000 + 1)
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    test_loader = DataLoader(test_set, batch_sampler=own_batches, **options)
    return train_loader, test_loader


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args, average):
    """Train for one epoch, test, and print a line."""
    rank = dist.get_rank()
    train_loader.sampler.set_epoch(epoch)  # NEW: without this, all epochs have the same order
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, images = run_epoch(model, bar, device, optimizer, average)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    if rank == 0:  # NEW: one line for all ranks
        digits = 12 if args.double else 4
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
            flush=True,
        )


def run_epoch(model, loader, device, optimizer=None, average=None):
    """Train, or with no optimizer, test. Returns sums over all ranks: loss, correct, images."""
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
            average(model)  # NEW: from here on, each gradient is that of the global batch
            optimizer.step()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    # NEW: the sums over all ranks. (A mean of the ranks' means would be wrong if one has fewer.)
    dist.all_reduce(sums)
    return sums.tolist()


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.add_argument("--bucket", action="store_true", help="average all in one all_reduce")


if __name__ == "__main__":  # false in the processes that main() starts, which import this file
    main()
