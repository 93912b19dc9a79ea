"""DDP with detectron2's helpers, for projects that use them: launch for ranks, comm for messages.

Run it (`playground/pages/installing.md` has the commands that install detectron2):
    python playground/distributed_data_parallel2.py -g 2

It prints a table of the ranks, and the numbers of `single_gpu.py`, up to rounding (times differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.12 s  53,396 images/s

detectron2, by Facebook AI Research, has two small modules that many projects have copied. A new
project does not need them: skip this lesson, unless yours has them.

`launch` replaces two steps of `distributed_data_parallel.py`: it starts the processes of this node,
and it joins each of them to the process group. `comm` has short functions for ranks and
collectives. Most of them also work in a single process that has no process group. For two nodes,
see `distributed_data_parallel.py`: the flags are the same. What has changed since then:
    git diff -w --patience --no-index playground/distributed_data_parallel{,2}.py

Try breaking it, in a copy (`cp playground/distributed_data_parallel2.py playground/broken.py`):
  1. Call `comm.reduce_dict` with `average=True`, and print `images` below it. This number is wrong
     now, but the loss and the accuracies stay right. Why?
  2. Move `parts = comm.gather(...)` into the `if comm.is_main_process():` below it, and run it with
     `--timeout 10`. Where does each rank wait?

Builds on: distributed_data_parallel.py
The next lesson, `distributed_data_parallel_torchrun.py`, lets torchrun start the ranks.
"""

import os
import platform
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model

try:
    # detectron2 uses parts of PyTorch that will be removed, and PyTorch would warn about each.
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        from detectron2.engine import launch
        from detectron2.utils import comm
except ImportError:
    commit = "02b5c4e295e990042a714712c21dc79b731e8833"
    url = f"git+https://github.com/facebookresearch/detectron2.git@{commit}"
    install = f"pip install ninja, then pip install --no-build-isolation '{url}'"
    sys.exit(f"error: detectron2 is missing: {install}")


def main():
    """Read the flags, make sure that the data is there, and start the ranks of this node."""
    parser = flags.training(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    check_flags(parser, args)
    # The data is fetched once on each node, before its ranks start.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    before = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_gpus(args)
    if args.device == "cpu":  # hide C++ back traces; Python raises the same errors
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    try:
        start(args)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        # The error is that of the first rank that failed.
        if "in init_process_group" in str(error):  # ranks are missing, or the port is taken
            ranks = args.nodes * args.gpus
            error = f"{error}\nAll {ranks} ranks must connect to node 0: start every node, with the"
            error += " same -n, -g, -ip and --port."
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for process in mp.active_children():
            process.kill()  # no rank outlives this process
        os.environ.clear()
        os.environ.update(before)  # in a notebook, this process runs on


def start(args):
    """Start the ranks of this node, and wait for their end."""
    address = f"tcp://{args.ip}:{args.port}"  # rank 0 listens there
    if args.nodes == 1:
        address = "auto"  # NEW: launch takes a free port of this node
    address = args.init_method or address
    # NEW: starts the processes of this node, joins each of them to the process group, selects its
    # GPU, and calls train(args) in it. With a single process it only calls train(args).
    launch(
        train,
        args.gpus,
        args.nodes,
        args.nr,
        dist_url=address,
        args=(args,),
        timeout=timedelta(seconds=args.timeout),
    )


def train(args):
    """Train as one of the ranks that launch has started."""
    rank, device = join(args)
    world_size = comm.get_world_size()
    if args.random_seed:
        args.seed = comm.shared_random_seed()  # NEW: rank 0 draws it and sends it to all ranks
    train_loader, test_loader = loaders(args, rank, world_size)
    torch.manual_seed(args.seed + rank)  # so that dropout, for example, differs between ranks
    model = make_model(args).to(device)
    # fused=True is faster. eps makes the lessons' digits equal: in your project, leave it out.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    plain = model  # without DDP
    if world_size > 1:  # NEW: DDP needs a group, and launch forms none for a single process
        model = DistributedDataParallel(model)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
        if rank == 0 and args.savefile:  # no collective in here: the others would not call it
            save(args, epoch + 1, plain, optimizer)
    del model  # DDP holds the process group. Otherwise the process may hang when Python ends.
    if world_size > 1:
        dist.destroy_process_group()


def join(args):
    """Compare the flags of all ranks, and print their table. Returns this rank and its device."""
    rank = comm.get_rank()  # NEW: comm reads these numbers from the group that launch has formed
    local_rank = comm.get_local_rank()
    device = torch.device(args.device)
    if args.device == "cpu":  # the ranks of a node divide its cores among themselves
        torch.set_num_threads(max(1, torch.get_num_threads() // args.gpus))
    else:
        device = torch.device(args.device, local_rank)
    row = f"{args.nr:<6}{rank:<6}{local_rank:<12}{device!s:<8}{os.getpid():<8}{platform.node()}"
    everyone = comm.all_gather((row, vars(args)))  # NEW: a list of the Python objects of all ranks
    flags.check_same([theirs for _, theirs in everyone])
    if comm.is_main_process():  # NEW: true on rank 0
        print("node  rank  local_rank  device  pid     host", flush=True)
        print(*[row for row, _ in everyone], sep="\n", flush=True)
    return rank, device


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    train_loader.sampler.set_epoch(epoch)  # without this, all epochs have the same order
    comm.synchronize()  # NEW: a barrier: all ranks wait for each other, and start the clock
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    hidden = None if comm.is_main_process() else True
    bar = tqdm(train_loader, title, leave=False, disable=hidden)
    sums = run_epoch(model, bar, device, optimizer)  # of this rank
    # NEW: one way to add up the sums of all ranks. reduce_dict adds up tensors, name by name.
    # Only rank 0 gets the result, and only rank 0 prints it.
    tensors = torch.tensor(sums, dtype=torch.float64, device=device)
    sums = {"loss": tensors[0], "correct": tensors[1], "images": tensors[2]}
    sums = comm.reduce_dict(sums, average=False)
    loss = sums["loss"].item()
    correct = sums["correct"].item()
    images = sums["images"].item()
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    # NEW: another way. gather takes any Python object. Rank 0 gets a list of those of all
    # ranks, and the other ranks get an empty list.
    parts = comm.gather(run_epoch(model, test_loader, device))
    if comm.is_main_process():
        _, test_correct, test_images = [sum(values) for values in zip(*parts, strict=True)]
        digits = 12 if args.double else 4
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
            flush=True,
        )


def visible_gpus(args):
    """Return the GPUs of this node's ranks, as a value for CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        numbers = visible.split(",")
    else:
        numbers = [str(number) for number in range(torch.cuda.device_count())]
    # NEW: launch uses NCCL if it sees a GPU, so --device cpu hides them all. It joins the group
    # before it selects a GPU. NCCL then takes the GPU with the rank's number: hide those left over.
    needed = args.gpus if args.device == "cuda" else 0
    return ",".join(numbers[:needed])


def add_flags(parser):
    """Add the flags of a lesson that starts its own ranks."""
    add = parser.add_argument
    add("-n", "--nodes", type=flags.positive, default=1, help="number of nodes")
    add("-g", "--gpus", type=flags.positive, help="ranks of each node; default: its GPUs, or 2")
    add("-r", "-nr", "--nr", type=int, default=0, help="number of this node, from 0")
    add("-ip", "--ip", help="address of node 0")
    add("--port", type=flags.port, default=29500, help="port of node 0; one node takes a free one")
    add("--init_method", metavar="URL", help="replaces -ip, --port: tcp://... or env://")
    add("--timeout", type=flags.positive, default=60, help="seconds to wait for another rank")
    add("-s", "--savefile", type=flags.new_file, help="a checkpoint, written after each epoch")
    add("--random_seed", action="store_true", help="draw a random seed, and ignore --seed")


def check_flags(parser, args):
    """Refuse flags with which launch cannot start the ranks of this node."""
    if args.device not in ("cpu", "cuda"):
        parser.error(f"launch does not know {args.device}: use --device cpu")
    parser.complete_nodes(args)
    if args.init_method and args.init_method.startswith("file:"):
        parser.error("launch cannot rely on file://: use --init_method tcp://<ip of node 0>:29500")


# ---------- Unchanged from distributed_data_parallel.py ----------
# You know what follows: save(). If you copy this lesson, copy this, too.


def save(args, epoch, model, optimizer):
    """Write a checkpoint, whole or not at all. resume() of lesson 9 loads it."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"epoch": epoch, "args": vars(args)}
    unfinished = Path(f"{args.savefile}.unfinished")
    try:
        with open(unfinished, "wb") as file:  # so that a full disk gives a clear error
            torch.save(state, file)
        os.replace(unfinished, args.savefile)
    finally:
        unfinished.unlink(missing_ok=True)  # left over only after an error


# ---------- Unchanged from single_gpu.py ----------
# You know what follows: run_epoch(). If you copy this lesson, copy this, too.


def run_epoch(model, loader, device, optimizer=None):
    """Train, or with no optimizer, test. Returns sums: loss, correct, number of images."""
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
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    return sums.tolist()


if __name__ == "__main__":
    main()
