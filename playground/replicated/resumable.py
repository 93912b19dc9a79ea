r"""Runs that survive failures and time limits: checkpoints, restarts by torchrun, a log and curves.

Run it, and let torchrun restart the ranks when one of them dies, at most three times:
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \
        --max-restarts 3 playground/replicated/resumable.py
The variable gives each restart a new store, the small server from which the ranks get each other's
addresses. An old one might still have the addresses of dead ranks.

Resume it with more epochs, here in one process, and look at the curves in a browser:
    torchrun --standalone --nproc-per-node 1 \
        playground/replicated/resumable.py --epochs 5
    tensorboard --logdir runs

The command with `--epochs 5` prints where it resumes (times differ):
    runs/mlp-mnist/epoch-000003.pt: 3 of 5 epochs are done
    epoch 4/5  loss 0.0952  train 97.12%  test 96.53%  0.41 s  146,442 images/s

`distributed_data_parallel_torchrun.py --savefile` resumes if you start it again. Here torchrun does
so: when a rank dies, it ends the others and starts all of them again, and they resume from the
newest checkpoint. An epoch that was not finished is repeated. Rank 0 keeps the last three
checkpoints, a log, and curves for TensorBoard, in a folder (`--run_dir`: give each run its own).

A cluster asks before it kills: Slurm, Kubernetes and machines that shut down send SIGTERM, and then
wait. The signal may come in the middle of a step, and to some ranks only. So a handler sets a flag,
and after every ten steps the ranks compute the maximum of their flags, which takes about 0.4 ms on
a CPU. All stop after the same step, rank 0 saves, and all leave with status 0 (torchrun with 1, if
the signal came to it). The next run resumes in the middle of the epoch. Try it with `kill` and the
process id that rank 0 prints. How to tell Slurm, and how long it waits, is in `run/README.md`.

Try breaking it, in a copy beside it:
  1. Run it with restarts, `--epochs 30` and `--run_dir runs/killed`. Rank 0 prints its process id:
     in a second terminal, type `kill -9` and this number. Compare the last line with that of a run
     without the kill.
  2. Comment out `optimizer.load_state_dict(...)`, and resume a run. Why do the losses differ?
  3. Replace the body of `anyone_asked()` with `return asked`, so that each rank obeys its own flag.
     Run it with `--epochs 30`, and `kill` rank 0.
Builds on: distributed_data_parallel_torchrun.py
The next lesson, `profile_steps.py`, measures where the time of a step goes.
"""

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model

CHECKPOINTS = f"epoch-{'[0-9]' * 6}.pt"  # with six digits, the order of names is that of epochs
# Steps between two looks at the flags. Each look is a message, and waits for the GPU. These steps,
# or a test, and the checkpoint must take less time than the cluster waits (torchrun waits 30 s).
FEW = 10
asked = False  # this rank's flag: has a signal asked it to stop?


def ask(number, frame):
    """Handle a signal. It may come in the middle of a step, so this only sets the flag."""
    global asked
    asked = True


def anyone_asked(device):
    """Return whether a signal has asked any rank to stop. All ranks must call it together."""
    # NEW: one maximum for all ranks. If each obeyed its own flag, some would leave, and the others
    # would wait for them in the next step. A barrier would not help, because it carries no value.
    flag = torch.tensor(float(asked), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag.item() == 1


def resume(folder, model, optimizer, args):
    """Load the newest checkpoint on each rank. Returns where the run is."""
    newest = None
    if dist.get_rank() == 0:
        newest = max(folder.glob(CHECKPOINTS), default=None)
    # NEW: rank 0 chooses for all ranks, because a new file in a network folder may appear on the
    # other nodes some seconds later. This sends its path, and each rank reads the file itself.
    # (If it is not there yet, this ends with an error, and torchrun starts the ranks again.)
    chosen = [newest]
    dist.broadcast_object_list(chosen)
    path = chosen[0]
    if path is None:
        return beginning(0)
    state = read(path)
    check_agreement(path, state["args"], args)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    if dist.get_rank() == 0:
        step = f" and {state['step']} steps" if state["step"] else ""
        log(folder, f"{path}: {state['epoch']} of {args.epochs} epochs{step} are done")
    return {name: state[name] for name in ("epoch", "step", "sums")}


def beginning(epoch):
    """Return where a run is when an epoch begins. "sums" are those of run_epoch()."""
    return {"epoch": epoch, "step": 0, "sums": [0.0, 0.0, 0.0]}


def train(args):
    """Resume a run from its newest checkpoint, or start it, and train as one of the ranks."""
    folder = folder_of(args)
    rank, device = join(args)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # NEW: run/README.md has who sends which
        signal.signal(number, ask)
    # (The workers of a DataLoader would die of it. Let their worker_init_fn ignore it.)
    if rank == 0:
        print(f"rank 0 is process {os.getpid()}", flush=True)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    progress = resume(folder, model.module, optimizer, args)  # NEW: where the run is
    fit(model, optimizer, train_loader, test_loader, device, args, folder, progress)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


def fit(model, optimizer, train_loader, test_loader, device, args, folder, progress):
    """Train and test, beginning where the run is. Rank 0 writes log, curves and checkpoints."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    steps = len(train_loader)
    if rank == 0:
        # NEW: a rank may die after an epoch's points are drawn, and before its checkpoint is saved.
        # Then the epoch is repeated, and purge_step makes TensorBoard hide the first points.
        curves = SummaryWriter(folder, purge_step=progress["epoch"] + 1)
    for epoch in range(progress["epoch"], args.epochs):
        done = progress["step"]
        train_loader.sampler.set_epoch(epoch)
        # NEW: dropout, if there is any, draws different numbers on each rank, and wherever a run
        # begins. With `args.seed + rank` alone, a resumed run would draw its first ones again.
        torch.manual_seed(args.seed + (epoch * steps + done) * world_size + rank)
        start = time.perf_counter()
        title = f"epoch {epoch + 1}/{args.epochs}"
        bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
        few = []  # batches
        for step, batch in enumerate(bar, start=1):
            if step <= done:
                continue  # NEW: the model has seen it. (sharded_data.py does not even read it.)
            few.append(batch)
            if len(few) < FEW and step < steps:
                continue
            sums = run_epoch(model, few, device, optimizer)
            few = []
            progress["step"] = step
            progress["sums"] = [old + new for old, new in zip(progress["sums"], sums, strict=True)]
            if anyone_asked(device):  # NEW: the same answer on all ranks, so all leave
                if rank == 0:
                    save(folder, progress, model.module, optimizer, args)
                    log(folder, f"stopped after step {progress['step']} of epoch {epoch + 1}")
                return
        seconds = time.perf_counter() - start
        speed = (steps - done) * args.batch_size / seconds
        loss, correct, images = progress["sums"]
        _, test_correct, test_images = run_epoch(model, test_loader, device)
        progress = beginning(epoch + 1)
        if rank == 0:
            digits = 12 if args.double else 4
            log(
                folder,
                f"{title}  loss {loss / images:.{digits}f}"
                f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
                f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
            )
            curves.add_scalar("loss", loss / images, epoch + 1)
            curves.add_scalar("accuracy/train", correct / images, epoch + 1)
            curves.add_scalar("accuracy/test", test_correct / test_images, epoch + 1)
            curves.add_scalar("images per second", speed, epoch + 1)
            curves.flush()
            save(folder, progress, model.module, optimizer, args)  # NEW: after each epoch
        if anyone_asked(device):  # during the test
            return


def save(folder, progress, model, optimizer, args):
    """Write a checkpoint, whole or not at all, and remove all but the last three."""
    # A schedule of the learning rate, a GradScaler or an EMA of your own belongs in here, too.
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= progress | {"args": vars(args)}
    unfinished = folder / "unfinished"
    try:
        with open(unfinished, "wb") as file:
            torch.save(state, file)
            # NEW: the node may fail, so the data must be on disk before the file gets its name.
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, folder / f"epoch-{progress['epoch']:06}.pt")
    finally:
        unfinished.unlink(missing_ok=True)  # left over only after an error
    for path in sorted(folder.glob(CHECKPOINTS))[:-3]:
        path.unlink()


# You can stop here: what follows reads a file, compares its flags, and writes the log.


def read(path):
    """Return what save() has written to a file, a dict."""
    try:
        # NEW: with mmap=True, a tensor is read only when it is used, so no rank has to hold a whole
        # checkpoint in memory beside its model.
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # its type depends on what the file contains
        error.add_note(f"{path} must be a checkpoint that all nodes can read.")
        hint = "If it is damaged, move it away, and the run resumes from the one before."
        if "Unsupported global" in str(error):
            hint = "It is not damaged: let save() write only tensors, Python's numbers and strings."
        error.add_note(hint)
        raise


def check_agreement(path, before, args):
    """Refuse a checkpoint that was written with different flags."""
    for flag in MUST_AGREE:
        if before[flag] != getattr(args, flag):
            raise ValueError(
                f"{path} was written with --{flag} {before[flag]}, not {getattr(args, flag)}:"
                " use the same flags, or a different --run_dir"
            )


# The numbers depend on these flags, so a run must be resumed with the same ones.
MUST_AGREE = ["model", "width", "layers", "tokens", "heads"]
MUST_AGREE += ["dataset", "batch_size", "lr", "seed", "double"]


def folder_of(args):
    """Return the folder of the run. If it cannot be written to, this ends with one line."""
    folder = args.run_dir or f"runs/{args.model}-{args.dataset}"
    try:
        return Path(flags.new_folder(folder))
    except argparse.ArgumentTypeError as error:
        sys.exit(f"error: {error}: choose another folder with --run_dir")


def log(folder, line):
    """Print a line, and append it to the log of the run."""
    print(line, flush=True)
    with open(folder / "log.txt", "a") as file:
        print(line, file=file)


def add_flags(parser):
    """Add the flag that only this lesson has."""
    where = "folder of the run; default: runs/<model>-<dataset>"
    parser.add_argument("--run_dir", type=flags.new_folder, help=where)


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), run_epoch(), check_flags() and main(). If you copy this lesson,
# copy this, too.


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


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.ranks(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)  # an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)  # only one rank downloads
    train(args)


if __name__ == "__main__":
    main()
