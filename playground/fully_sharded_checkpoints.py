r"""Checkpoints of a sharded model: each rank writes its shards, and any number of ranks resumes.

With --run_dir, every rank writes its shards to a folder after each epoch (dcp.save), so no rank
needs memory for the whole model. All nodes must see this folder. A run that is started again
resumes from the newest checkpoint.
The number of ranks may be different then, because each rank looks up which files contain its new
shards (dcp.load). Here dcp stands for torch.distributed.checkpoint.

With --async_save, training does not wait for the disk. dcp.async_save() copies the shards to CPU
memory, and a thread writes this copy while the next epoch trains.

With --savefile, one file is made from the shards. The ranks gather parameters and Adam's averages,
one tensor at a time, and rank 0 writes a file that any lesson's model and optimizer can load. With
--load, a run starts from such a file. Only rank 0 reads it. It sends one tensor at a time, and each
rank keeps its shard.

With --dropout, ranks should drop different neurons, because they have different images. So each
rank has a seed of its own at the start of each epoch. A run that is resumed by as many ranks then
drops the same neurons as a run without a break.

Run it, then resume it with more ranks, and make one file:
    torchrun --standalone --nproc-per-node 2 playground/fully_sharded_checkpoints.py \
        --run_dir runs/fsdp
    torchrun --standalone --nproc-per-node 4 playground/fully_sharded_checkpoints.py \
        --run_dir runs/fsdp --epochs 5 --savefile checkpoints/fsdp.pt

Start from this file, or from one that `distributed_data_parallel.py --savefile` has written:
    torchrun --standalone --nproc-per-node 2 playground/fully_sharded_checkpoints.py \
        --load checkpoints/fsdp.pt --epochs 6

It prints where it resumes. This is the second command, with four processes on two cores (times will
differ):
    runs/fsdp/epoch-0003: 3 of 5 epochs are done
    epoch 4/5  loss 0.0898  train 97.26%  test 96.84%  35.33 s  1,695 images/s

Try breaking it, in a copy:
  1. Delete the file .metadata in the newest folder. Where does the next run resume, and why?
  2. Leave out `process_group=group`, and run it with --async_save. What goes wrong, and why?
  3. Comment out the second `torch.manual_seed(...)`. With --model cnn --dropout 0.5, train two
     epochs without a break, and then two with a break after the first. Compare the losses.

Now write it yourself: seeded_dropout.py in playground/exercises/.

The next lesson, model_parallel.py, splits a model between two devices.
"""

import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import equal_batches, fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet

# The numbers depend on these flags, so a run must be resumed with the same ones.
TRAINED_WITH = ("model", "width", "layers", "tokens", "heads", "dropout")
TRAINED_WITH += ("dataset", "batch_size", "lr", "seed", "double")


def save_shards(args, epoch, model, optimizer, group):
    """Write a sharded checkpoint. Returns the future of a thread with --async_save, else None."""
    # NEW: on each rank these are its own shards, by the names of the parameters.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": epoch, "args": vars(args)}
    folder = f"{args.run_dir}/epoch-{epoch:04}"
    if not args.async_save:
        dcp.save(state, checkpoint_id=folder)  # NEW: all ranks write at the same time
        return None
    # NEW: returns as soon as the shards are copied. Then the next step may change them.
    return dcp.async_save(state, checkpoint_id=folder, process_group=group)


def newest_checkpoint(run_dir):
    """Return the path of the newest complete checkpoint, or None if there is none."""
    # dcp writes the file .metadata last, so a folder without it is not complete.
    complete = sorted(Path(run_dir).glob("epoch-*/.metadata"))
    return str(complete[-1].parent) if complete else None


def stop(message):
    """End the run because of an error that all ranks have found. Rank 0 prints it."""
    sys.exit(f"error: {message}" if dist.get_rank() == 0 else 1)


def reason(error):
    """Return an error in one line."""
    return traceback.format_exception_only(error)[-1].splitlines()[0]


def compare(path, flags_before, args):
    """End the run if a checkpoint was trained with different flags."""
    for name, before in flags_before.items():
        if before != getattr(args, name):
            differ = f"{name}={before}, not {getattr(args, name)}"
            stop(f"{path} was trained with {differ}: use the same flags, or start another run")


def read(path, state):
    """Replace the values in a state with those of a sharded checkpoint."""
    try:
        dcp.load(state, checkpoint_id=path)  # NEW: reads only what the state has already
    except dcp.CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))  # the error of one rank, and its traceback
        stop(f"{path} is damaged: delete it to resume from an older one ({reason(failure)})")


def load_shards(path, args, model, optimizer):
    """Load a sharded checkpoint, however many ranks wrote it. Returns how many epochs are done."""
    progress = {"epoch": None, "args": dict.fromkeys(TRAINED_WITH)}  # values to be read
    read(path, progress)
    compare(path, progress["args"], args)
    # NEW: get_state_dict() returns the shards of this rank, and read() writes into them. Adam has
    # no state before its first step, so get_state_dict() makes a step with gradients of zero. Adam
    # counts it, and read() restores the count. In a new run nothing would restore it, so do not
    # call get_state_dict() there before the first step.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    read(path, {"model": model_state, "optimizer": optimizer_state})
    set_model_state_dict(model, model_state)
    set_optimizer_state_dict(model, optimizer, optimizer_state)  # also sets the learning rate
    return progress["epoch"]


def save_file(args, epoch, model, optimizer):
    """Write one file with whole tensors, which a plain model and optimizer can load."""
    # NEW: full_state_dict gathers the shards of one tensor after the other. cpu_offload moves each
    # whole tensor to the CPU of rank 0. The other ranks keep none, and get empty dicts.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        whole = {
            "model": model_state,
            "optimizer": optimizer_state,
            "epoch": epoch,
            "args": vars(args),
        }
        unfinished = f"{args.savefile}.{time.time_ns()}"  # a name that no other job uses
        torch.save(whole, unfinished)
        os.replace(unfinished, args.savefile)


def load_file(path, args, model, optimizer, device):
    """Load one file, which only rank 0 reads. Returns how many epochs are done."""
    model_state = {}
    optimizer_state = {}
    progress = [None, None]
    if dist.get_rank() == 0:
        try:
            whole = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:  # its type depends on what is wrong with the file
            sys.exit(f"error: cannot load {path}: {reason(error)}")
        model_state = whole["model"]
        optimizer_state = by_name(whole["optimizer"], model)
        progress = [whole["epoch"], whole["args"]]
    dist.broadcast_object_list(progress, device=device)
    epoch, before = progress
    # The other lessons lack some flags of this one.
    compare(path, {name: before[name] for name in TRAINED_WITH if name in before}, args)
    # NEW: full_state_dict says that the tensors are whole. broadcast_from_rank0 says that only rank
    # 0 has them. It sends one after the other, and each rank keeps its shard.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, model_state, options=options)
    set_optimizer_state_dict(model, optimizer, optimizer_state, options=options)
    return epoch


def by_name(optimizer_state, model):
    """Return an optimizer's state, with the names of parameters in place of their numbers."""
    names = [name for name, _ in model.named_parameters()]
    [group] = optimizer_state["param_groups"]
    state = {}
    # The lengths differ only for another model, which compare() refuses afterwards.
    for name, number in zip(names, group["params"], strict=False):
        state[name] = optimizer_state["state"][number]
    return {"state": state, "param_groups": [group | {"params": names}]}


def join(args):
    """Join the process group and print the table of ranks. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        gpu = torch.device("cuda", local_rank)
        device = gpu
        backend = "nccl"
        torch.cuda.set_device(gpu)
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


def shard(model, args):
    """Shard each layer, and then the whole model."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))  # all ranks in a row
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    for part in (*model.stage1, *model.stage2, model):
        if list(part.parameters()):
            fully_shard(part, mesh=mesh)


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer. Returns three sums over all ranks."""
    model.train(optimizer is not None)
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
    """Train and test, from a checkpoint if there is one, and write one after each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    # All ranks call forward() the same number of times, as in fully_sharded_data_parallel.py.
    test_loader = equal_batches(test_loader.dataset, rank, world_size)
    torch.manual_seed(args.seed)  # equal on all ranks, because each keeps a shard of what it draws
    model = make_model(args)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = args.dropout  # in the other lessons it is 0
    # This also moves the shards to the device, one layer after the other.
    shard(model, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    # Rank 0 chooses the checkpoint for all ranks, because nodes may see different files.
    newest = [None]
    if rank == 0 and args.run_dir:
        newest = [newest_checkpoint(args.run_dir)]
    dist.broadcast_object_list(newest, device=device)
    path = newest[0] or args.load
    done = 0  # epochs
    if newest[0]:
        done = load_shards(path, args, model, optimizer)
    elif args.load:
        done = load_file(path, args, model, optimizer, device)
    if rank == 0 and path:
        print(f"{path}: {done} of {args.epochs} epochs are done", flush=True)
    group = None
    if args.async_save:
        # NEW: the threads send messages, too, which must not mix with those of training. So they
        # have a group of their own. It uses gloo, because the copies are in CPU memory. (On GPUs,
        # init_process_group("cpu:gloo,cuda:nccl") is another way: a backend for each device.)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))
    writing = None  # the future of a checkpoint that a thread writes

    for epoch in range(done, args.epochs):  # epochs that are done are not repeated
        train_loader.sampler.set_epoch(epoch)
        # NEW: different on each rank and in each epoch, so each rank drops different neurons.
        torch.manual_seed(args.seed + epoch * world_size + rank)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
        if writing:
            writing.result()  # NEW: waits for the thread, and raises its error
        if args.run_dir:
            writing = save_shards(args, epoch + 1, model, optimizer, group)
    if writing:
        writing.result()
    if args.savefile:
        save_file(args, max(done, args.epochs), model, optimizer)
    # DTensor's caches keep the group, and with it gloo's threads. While the ranks wait here, these
    # threads free the last message. If they did so later, Python might abort at its end.
    dist.barrier()
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    add = parser.add_argument
    add("--run_dir", help="folder for sharded checkpoints; resumes from the newest in it")
    add("--async_save", action="store_true", help="write them while the next epoch trains")
    add("--load", help="start from this file, unless --run_dir has a checkpoint")
    add("-s", "--savefile", help="write one file with whole tensors at the end")
    add("--dropout", type=float, default=0.0, help="fraction of the hidden neurons to drop (cnn)")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout}: must be 0 or more, and below 1")
    if args.dropout and args.model != "cnn":
        parser.error(f"--dropout {args.dropout}: only the CNN has it, so add --model cnn")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
