r"""Data that does not fit in memory, and a run that resumes in the middle of an epoch.

Run it. The first makes files of MNIST (220 MB). Give both the same `--dataset` and `--double`:
    python playground/replicated/sharded_data.py --make
    torchrun --standalone --nproc-per-node 2 playground/replicated/sharded_data.py

It prints the same numbers as `single_gpu.py`, up to rounding (times differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  9.61 s  6,232 images/s

Save a checkpoint after every five steps, and stop after the first one. Resume with four ranks:
    torchrun --standalone --nproc-per-node 2 \
        playground/replicated/sharded_data.py --savefile runs/data.pt --every 5 --stop
    torchrun --standalone --nproc-per-node 4 \
        playground/replicated/sharded_data.py --savefile runs/data.pt

The last command first prints where it resumes, and then the same epochs as above:
    runs/data.pt: 640 images of epoch 1 are done

The training images are in four files of unequal length. If each rank had files of its own, one rank
would run out of images first, and the others would wait for it in an all_reduce. So the images of
all files are numbered, as if they were in one. An image is read only when it is needed.

The order of an epoch depends on nothing but the seed and the epoch, so each rank computes it
without a message. The next `--batch_size` numbers of it are a global batch, of which each rank
reads its part. With any number of ranks that divides `--batch_size`, the global batches are those
of a single process, and all ranks make equally many steps.

One number tells where a run is: how many images of its epoch the model has seen, on all ranks
together. Count them in the training loop, because the processes that read, the workers of a
DataLoader, are some batches ahead of it.

Try breaking it, in a copy beside it:
  1. Seed with `seed + epoch + rank` in `own_batches()`. Does an epoch still have every image?
  2. Write `print("read")` in `Files.__getitem__()`, and run it in one process with
     `--every 5 --stop`. How many images are read, and how many has the model seen?
  3. Let Files keep the arrays instead of the paths. How long is `pickle.dumps(train_set)` then?
Now repair `own_sampler.py` and `resumed.py` in `playground/museum/`.
Builds on: resumable.py
This is the last lesson of this part. The next part begins with `sharded_optimizer.py`.
"""

import bisect
import functools
import itertools
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, load
from common.models import make_model


class Files(Dataset):
    """The images of several files, numbered from 0 as if they were in one.

    Args:
        folder: has train-0-images.npy, (N, 1, 28, 28), train-0-labels.npy, int64 (N,), and so on.
        part: "train" or "test".
    """

    def __init__(self, folder, part):
        # NEW: keep paths, not arrays. A worker may get a copy of this object, and the arrays would
        # be copied with all their numbers.
        self.images = sorted(folder.glob(f"{part}-*-images.npy"))
        self.labels = sorted(folder.glob(f"{part}-*-labels.npy"))
        names = [path.name.replace("-images", "-labels") for path in self.images]
        lengths = [len(opened(path)) for path in self.images]
        matches = names == [path.name for path in self.labels]
        if not matches or lengths != [len(opened(path)) for path in self.labels]:
            raise ValueError(f"{folder}: files of images and of labels do not match")
        self.starts = list(itertools.accumulate(lengths, initial=0))

    def __len__(self):
        """Return the number of images in all files."""
        return self.starts[-1]

    def __getitem__(self, number):
        """Read one image, (1, 28, 28), and its label, ()."""
        # The last file that starts at this number or before it.
        file = bisect.bisect_right(self.starts, number) - 1
        row = number - self.starts[file]
        image = opened(self.images[file])[row]
        label = opened(self.labels[file])[row]
        return torch.tensor(image), torch.tensor(label)  # tensor() copies them into memory


@functools.cache  # once in each process
def opened(path):
    """Return an array that stays on disk (a memmap). Only the numbers that are used are read."""
    return numpy.load(path, mmap_mode="r")


def own_batches(images, batch_size, seed, epoch, done, rank, world_size):
    """Return what this rank reads in the rest of an epoch: a list of numbers for each step.

    Args:
        images: the number of images in all files.
        done: how many images of the epoch the model has seen, on all ranks together.
    """
    # NEW: this order is the same on all ranks, for any number of ranks, and after a restart.
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(images, generator=generator)  # 8 bytes an image. As a list, about 36
    batches = []
    # NEW: whole batches only, so all ranks have as many images in each step.
    for start in range(done, images - batch_size + 1, batch_size):
        global_batch = order[start : start + batch_size]
        batches.append(global_batch[rank::world_size].tolist())
    return batches


def make_loader(data, batches, args):
    """Return a loader of these batches of numbers, which its workers read in advance."""
    pin = args.device != "cpu"
    # A worker may never answer, as when its disk hangs. By default, the rank would wait for ever.
    options = {"num_workers": args.workers, "timeout": args.timeout, "pin_memory": pin}
    return DataLoader(data, batch_sampler=batches, **options)


def train(args):
    """Start a run, or resume it, and train as one of the ranks."""
    rank, device = join(args)
    train_set, test_set = Files(folder_of(args), "train"), Files(folder_of(args), "test")
    # Each test image is on one rank only.
    batches = torch.arange(len(test_set)).tensor_split(len(test_set) // 1000 + 1)
    test_batches = [batch[rank :: dist.get_world_size()].tolist() for batch in batches]
    test_loader = make_loader(test_set, test_batches, args)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    progress = beginning(0)
    if args.resume:
        progress = resume(model.module, optimizer, args)  # NEW: where the run is
    fit(model, optimizer, train_set, test_loader, device, args, progress)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


def beginning(epoch):
    """Return where a run is when no image of an epoch is seen. "sums" are those of run_epoch()."""
    return {"epoch": epoch, "images": 0, "sums": [0.0, 0.0, 0.0]}


def fit(model, optimizer, train_set, test_loader, device, args, progress):
    """Train and test, beginning where the run is. Print one line for each epoch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = len(train_set) // args.batch_size * args.batch_size  # the images of an epoch
    for epoch in range(progress["epoch"], args.epochs):
        done = progress["images"]
        # Dropout, if there is any, draws different numbers on each rank and after each restart.
        torch.manual_seed(args.seed + epoch * whole + done + rank)
        start = time.perf_counter()
        size = args.batch_size
        batches = own_batches(len(train_set), size, args.seed, epoch, done, rank, world_size)
        loader = make_loader(train_set, batches, args)
        title = f"epoch {epoch + 1}/{args.epochs}"
        bar = tqdm(loader, title, leave=False, disable=None if rank == 0 else True)
        ready = iter(bar)
        while progress["images"] < whole:
            # NEW: train on the next few batches, until it is time to save.
            sums = run_epoch(model, itertools.islice(ready, args.every), device, optimizer)
            # NEW: now the model has seen these images. The workers are already reading later ones.
            progress["images"] = min(progress["images"] + args.every * size, whole)
            progress["sums"] = [old + new for old, new in zip(progress["sums"], sums, strict=True)]
            if rank == 0 and args.savefile:
                save(model.module, optimizer, args, progress)
            if args.stop:
                return
        bar.close()
        seconds = time.perf_counter() - start
        speed = (whole - done) / seconds
        loss, correct, images = progress["sums"]
        _, test_correct, test_images = run_epoch(model, test_loader, device)
        if rank == 0:
            digits = 12 if args.double else 4
            print(
                f"{title}  loss {loss / images:.{digits}f}"
                f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
                f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
                flush=True,
            )
        progress = beginning(epoch + 1)


def save(model, optimizer, args, progress):
    """Write a checkpoint, whole or not at all."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"progress": progress, "args": vars(args)}  # NEW: where the run is
    unfinished = Path(f"{args.savefile}.unfinished")
    try:
        with open(unfinished, "wb") as file:  # so that a full disk gives a clear error
            torch.save(state, file)
        os.replace(unfinished, args.savefile)
    finally:
        unfinished.unlink(missing_ok=True)  # left over only after an error


# The numbers depend on these, so a run must be resumed with the same ones.
MUST_AGREE = ["images", "dataset", "batch_size", "lr", "seed", "double"]
MUST_AGREE += ["model", "width", "layers", "tokens", "heads"]


def resume(model, optimizer, args):
    """Load the checkpoint on each rank. Returns where the run is."""
    state = torch.load(args.savefile, map_location="cpu", weights_only=True)
    for name in MUST_AGREE:
        before, now = state["args"].get(name), getattr(args, name)
        if before != now:
            raise ValueError(f"{args.savefile} was written with {name} {before}, not {now}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    progress = state["progress"]
    if dist.get_rank() == 0:
        where = f"{progress['images']:,} {args.unit} of epoch {progress['epoch'] + 1} are done"
        print(f"{args.savefile}: {where}", flush=True)
    return progress


# You can stop here: what follows makes the files, and reads the flags.


def folder_of(args):
    """Return the folder of the files, such as runs/files/mnist."""
    return Path(args.files, f"{args.dataset}-double" if args.double else args.dataset)


def make(args):
    """Write the training images to four files of unequal length. The test images come last."""
    args.dataset = fetch(args.dataset, args.data_dir)
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    ends = [round(part * len(train_set)) for part in (0, 0.07, 0.32, 0.45, 1)]
    parts = {}
    for number, (start, end) in enumerate(itertools.pairwise(ends)):
        parts[f"train-{number}"] = (train_set.images[start:end], train_set.labels[start:end])
    parts["test-0"] = (test_set.images, test_set.labels)
    folder = folder_of(args)
    folder.mkdir(parents=True, exist_ok=True)
    for name, (images, labels) in parts.items():
        numpy.save(folder / f"{name}-images.npy", images.numpy())
        numpy.save(folder / f"{name}-labels.npy", labels.numpy())
        print(f"{folder}/{name}-images.npy: {len(labels):,} {args.unit}")


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    add("--make", action="store_true", help="make the files, and train nothing (without torchrun)")
    add("--files", type=os.path.expanduser, default="runs/files", help="folder of the files")
    add("--workers", type=flags.positive, default=2, help="processes of each rank that read")
    add("--savefile", type=flags.new_file, help="a checkpoint; if it is there, the run resumes")
    add("--every", type=flags.positive, default=100, help="steps from checkpoint to checkpoint")
    add("--stop", action="store_true", help="stop after the first checkpoint")


def check_files(parser, args):
    """Count the images. Refuse to train without files, or with too few images for a batch."""
    folder = folder_of(args)
    args.images = [len(Files(folder, part)) for part in ("train", "test")]
    if 0 in args.images:
        parser.error(f"not all files are in {folder}: use python {' '.join(sys.argv)} --make")
    if args.batch_size > args.images[0]:
        parser.error(f"--batch_size must be at most {args.images[0]}, all training {args.unit}")


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags. Then make the files, or train as one of the ranks."""
    parser = flags.ranks(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    if args.make:  # in one process, without ranks
        make(args)
        return
    parser.check_torchrun(args)  # an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    if args.dataset is None:  # as in --make: MNIST if possible
        args.dataset = "mnist"
        if not folder_of(args).exists():
            args.dataset = "digits"
    check_files(parser, args)
    # NEW: each rank looks for the checkpoint before rank 0 may write one. If only some ranks see
    # it, the folder is not shared, and join() raises an error, as for different numbers of images.
    args.resume = args.savefile is not None and Path(args.savefile).exists()
    train(args)


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), run_epoch() and check_flags(). If you copy this lesson, copy this,
# too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device, gpu = torch.device(args.device), None  # gpu stays None on a CPU
    if args.device != "cpu":
        device = gpu = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()  # torchrun has set it, the world size and the address of rank 0
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


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


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks."""
    parser.check_batch(args.batch_size, world_size)


if __name__ == "__main__":
    main()
