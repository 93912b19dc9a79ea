r"""torchrun starts the ranks, and passes each its rank in environment variables.

Run it on one node (`--standalone` makes torchrun choose a free port):
    torchrun --standalone --nproc-per-node 2 playground/distributed_data_parallel_torchrun.py

It prints the same numbers as `single_gpu.py`, up to rounding (times differ):
    2 ranks, gloo, cpu
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.43 s  41,881 images/s

torchrun starts the processes of a node, and sets variables in the environment of each.
`init_process_group` reads four: `RANK`, `WORLD_SIZE`, and the address and port at which all ranks
find rank 0, `MASTER_ADDR` and `MASTER_PORT`. `join` reads a fifth, `LOCAL_RANK`, which selects the
GPU. Use torchrun, which comes with PyTorch, unless a larger program must start the ranks.

On two nodes, run this on the first one, and the same with `--node-rank 1` on the second one:
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 --master-addr <ip of node 0> \
        --master-port 29500 playground/distributed_data_parallel_torchrun.py

torchrun may set `OMP_NUM_THREADS` to 1, so that each process uses one core. To use four, put
OMP_NUM_THREADS=4 in front. A wrong flag stands above torchrun's report, other errors at its end.

This is the lesson to copy into a new project. (A script that you have: pages/your_script.md.) With
`--savefile run.pt`, it saves after each epoch, and resumes there if you run it again. The others
wait while rank 0 saves, so let `--timeout`, 60 s, be longer than it takes (PyTorch's own default is
10 or 30 minutes). What has changed since lesson 7, and since lesson 4:
    git diff -w --patience --no-index playground/distributed_data_parallel{,_torchrun}.py
    git diff -w --patience --no-index playground/{single_gpu,distributed_data_parallel_torchrun}.py

Try breaking it, in a copy beside it:
  1. Write `assert rank == 0` below the line with `join(args)`. What is reported? Without `@record`?
Now repair `moving_average.py` and `standardized.py` in `playground/museum/`.
Builds on: distributed_data_parallel.py
The next lesson, `model_parallel.py`, puts a model on two devices.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # unused: without it, Python may abort at its end on CPUs
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find common/ from any folder
from common import flags
from common.data import fetch, load, whole_batch
from common.models import make_model


@record  # NEW: writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.ranks(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)  # NEW: an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # only one rank downloads
    train(args)


def train(args):
    """Train as one of the ranks that torchrun has started."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)  # all ranks make the same model
    model = make_model(args).to(device)
    # fused=True is faster. eps makes the lessons' digits equal: in your project, leave it out.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    done = resume(args, model, optimizer)  # NEW: before DDP is made
    model = DistributedDataParallel(model)  # sends the model of rank 0 to all ranks
    for epoch in range(done, args.epochs):
        # Dropout differs by rank. With the epoch in the seed, a resumed run draws the same numbers.
        torch.manual_seed(args.seed + epoch * dist.get_world_size() + rank)
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
        if rank == 0 and args.savefile:  # no collective in here: the others would not call it
            save(args, epoch + 1, model.module, optimizer)  # module: the model inside DDP
    del model  # DDP holds the process group. Otherwise the process may hang when Python ends.
    dist.destroy_process_group()


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # NEW: torchrun has numbered this node's processes
    device, gpu = torch.device(args.device), None  # gpu stays None on a CPU
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()  # NEW: torchrun has set it, the world size and the address of rank 0
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


def resume(args, model, optimizer):
    """Load the checkpoint, if there is one, on all ranks. Returns how many epochs are done.

    It must be on a disk of all nodes. (DDP sends rank 0's parameters, but no optimizer state.)
    """
    found = [args.savefile and os.path.exists(args.savefile)]
    dist.broadcast_object_list(found)  # NEW: rank 0 decides, so that all ranks begin alike
    if not found[0]:
        return 0
    # NEW: not to the GPU of rank 0. weights_only takes tensors, numbers and strings, but no code.
    state = torch.load(args.savefile, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])  # with its learning rate: --lr is ignored
    if dist.get_rank() == 0:
        print(f"{args.savefile}: {state['epoch']} of {args.epochs} epochs are done", flush=True)
    return state["epoch"]


# ---------- Nearly as in distributed_data_parallel.py ----------
# If you have read that lesson, you can stop here. If you copy this one, copy everything.


def loaders(args, rank, world_size):
    """Return a DataLoader of this rank's training images, and one of its test images."""
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    # These data sets return whole batches. Yours does not: leave collate_fn out; set num_workers.
    options = {"collate_fn": whole_batch, "pin_memory": args.device != "cpu"}
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size
    # drop_last leaves out an incomplete last batch, which several ranks could not divide equally.
    train_loader = DataLoader(train_set, per_rank_batch, sampler=sampler, drop_last=True, **options)
    if len(train_loader) == 0 or len(test_set) < world_size:
        raise ValueError("fewer training images than a batch has, or fewer test images than ranks")
    # Each test image counts once, and all ranks have equally many batches, because forward() may
    # send messages, as that of FSDP does.
    batches = torch.arange(len(test_set)).tensor_split(len(test_set) // 1000 + 1)
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    test_loader = DataLoader(test_set, batch_sampler=own_batches, **options)
    return train_loader, test_loader


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    rank = dist.get_rank()
    train_loader.sampler.set_epoch(epoch)  # without this, all epochs have the same order
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, images = run_epoch(model, bar, device, optimizer)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    if rank == 0:
        digits = 12 if args.double else 4
        peak = ""  # of the memory that this rank's tensors have taken on its GPU
        if args.device != "cpu":
            peak = f"  {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB"
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s{peak}",
            flush=True,
        )


def run_epoch(model, loader, device, optimizer=None):
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
            optimizer.step()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


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


def add_flags(parser):
    """Add the flag that only this lesson has."""
    parser.add_argument("-s", "--savefile", type=flags.new_file, help="a checkpoint, to resume")


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks."""
    parser.check_batch(args.batch_size, world_size)


if __name__ == "__main__":
    main()
