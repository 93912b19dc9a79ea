r"""Runs that survive failures: resuming from checkpoints, a log, curves, restarts by torchrun.

A long run often ends too early: a process dies, a node fails, or the job reaches its time limit. So
rank 0 keeps a folder with a log, curves for TensorBoard and the last three checkpoints. A run that
is started again resumes from the newest checkpoint. torchrun can restart the ranks. When one of
them dies, torchrun ends the others and starts all of them again, up to --max-restarts times.

Run it with restarts:
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 \
        --max-restarts 3 playground/distributed_data_parallel_resumable.py

The variable in front of the command is for the restarts. Ranks find each other's addresses in a
small server, the store. Without the variable, torchrun keeps the store after a restart, and new
ranks may find the addresses of dead ones there.

Resume it with more epochs, here in a single process, and look at the curves in a browser:
    python playground/distributed_data_parallel_resumable.py --epochs 5
    tensorboard --logdir runs

It prints the table of ranks, and then where it resumes (times will differ):
    runs/mlp-mnist: 3 of 5 epochs are done (another --run_dir starts another run)
    epoch 4/5  loss 0.0968  train 96.97%  test 96.65%  1.49 s  40,152 images/s

Run it on one or two nodes, with the same command on each:
    NODE0=<ip> NODES=1:2 RESTARTS=3 \
        run/torchrun_node.sh playground/distributed_data_parallel_resumable.py

NODES=1:2 means at least one node and at most two. When a node joins or leaves, torchrun restarts
all ranks, and they resume from the newest checkpoint. --run_dir must be a folder that both nodes
share. --batch_size must be divisible by the number of processes, with one node and with two.

Try breaking it, in a copy:
  1. Run it with restarts, --epochs 30 and --run_dir runs/killed. Kill a rank by its process id,
     which is in the table. Compare the last lines with those of a run without the kill, in another
     --run_dir.
  2. Comment out `optimizer.load_state_dict(...)`, and resume a run. Why do the losses differ?

Now write it yourself: save_and_resume.py in playground/exercises/.

The next lesson, distributed_data_parallel_resnet.py, trains a larger model on colour images.
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
from torch.utils.tensorboard import SummaryWriter

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet

# NEW: the numbers depend on these flags, so a run must be resumed with the same ones.
MUST_AGREE = ["model", "width", "layers", "tokens", "heads"]
MUST_AGREE += ["dataset", "batch_size", "lr", "seed", "double"]


def save(args, epoch, model, optimizer):
    """Write a checkpoint, and remove all but the last three."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"epoch": epoch, "args": vars(args)}
    unfinished = f"{args.run_dir}/unfinished-{time.time_ns()}"
    with open(unfinished, "wb") as file:
        torch.save(state, file)
        # NEW: the data reaches the disk before the file gets its name, because the node may fail.
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, f"{args.run_dir}/epoch-{epoch:04}.pt")
    paths = sorted(Path(args.run_dir).glob("epoch-*.pt"))
    for path in paths[:-3]:
        path.unlink()


def newest_checkpoint(args):
    """Return the path of the newest checkpoint that can be read, or None if there is none.

    If the flags do not fit the checkpoint, or if all checkpoints are damaged, the run ends here.
    torchrun treats this as a failure, so with --max-restarts it starts the ranks again, and they
    end with the same line.
    """
    paths = sorted(Path(args.run_dir).glob("epoch-*.pt"), reverse=True)  # the newest first
    for path in paths:
        try:
            # NEW: with mmap=True a tensor is read only when it is used, so this check is fast. It
            # finds a truncated file, but does not notice changed numbers inside a tensor.
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # its type depends on the damage
            kind = type(error).__name__
            log(args, f"WARNING: {path} is damaged ({kind}): trying the one before it")
            continue
        for name in MUST_AGREE:
            before = state["args"][name]
            now = getattr(args, name)
            if before != now:
                sys.exit(
                    f"error: {path} was trained with {name}={before}, not {now}:"
                    " use the same flags, or another --run_dir"
                )
        done = f"{state['epoch']} of {args.epochs} epochs are done"
        log(args, f"{args.run_dir}: {done} (another --run_dir starts another run)")
        return str(path)
    if paths:  # a new run would mix its files with these, which might still be repaired
        sys.exit(f"error: all checkpoints in {args.run_dir} are damaged: use another --run_dir")
    return None


def resume(path, model, optimizer):
    """Load a checkpoint on this rank. Returns how many epochs are done."""
    # NEW: with mmap=True, each rank reads a tensor of the file only when the tensor is copied into
    # the model. So no rank holds the whole checkpoint in memory beside the model.
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"]


def log(args, line):
    """Print a line, and append it to the log in the run's folder."""
    print(line, flush=True)
    with open(f"{args.run_dir}/log.txt", "a") as file:
        print(line, file=file)


def join(args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)  # otherwise every rank would also take memory on GPU 0
    else:
        gpu = None
        device = torch.device("cpu")
        backend = "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    node = os.environ.get("GROUP_RANK", "0")
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
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    # NEW: rank 0 chooses the checkpoint for all ranks. If every rank looked into a network folder,
    # the nodes might see different files for a few seconds.
    chosen = [None]
    if rank == 0:
        chosen = [newest_checkpoint(args)]
    dist.broadcast_object_list(chosen, device=device)  # NEW: sends a path, not the checkpoint
    path = chosen[0]
    done = resume(path, model.module, optimizer) if path else 0
    if rank == 0:
        # NEW: a run may stop after it has drawn the points of an epoch, but before its checkpoint.
        # Then this epoch is repeated, and purge_step hides the old points.
        curves = SummaryWriter(args.run_dir, purge_step=done + 1)

    # NEW: epochs that are done are not repeated. An epoch that was not finished is repeated from
    # its beginning. If your epochs take hours, save every few minutes, with the number of batches
    # that are done, and skip that many batches. (torchdata's StatefulDataLoader does this for you.)
    for epoch in range(done, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        # NEW: dropout and random crops, if there are any, draw different numbers on each rank and
        # in each epoch. Without this line, a resumed run would draw those of the first epoch.
        torch.manual_seed(args.seed + epoch * world_size + rank)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model.module, test_loader, device)
        if rank == 0:
            loss, hits, images = trained
            _, test_hits, test_images = tested
            log(args, epoch_line(args, epoch, seconds, trained, tested))
            curves.add_scalar("loss", loss / images, epoch + 1)
            curves.add_scalar("accuracy/train", hits / images, epoch + 1)
            curves.add_scalar("accuracy/test", test_hits / test_images, epoch + 1)
            curves.add_scalar("images per second", images / seconds, epoch + 1)
            curves.flush()
            save(args, epoch + 1, model.module, optimizer)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--run_dir", help="folder of the run; default: runs/<model>-<dataset>")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    if args.run_dir is None:
        args.run_dir = f"runs/{args.model}-{args.dataset}"
    os.makedirs(args.run_dir, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
