r"""Checkpoints of a sharded model: each rank writes its shards, or rank 0 writes one file.

Run it, then resume it with more ranks:
    torchrun --standalone --nproc-per-node 2 playground/sharded/fully_sharded_checkpoints.py \
        --run_dir runs/fsdp
    torchrun --standalone --nproc-per-node 4 playground/sharded/fully_sharded_checkpoints.py \
        --run_dir runs/fsdp --epochs 5

The second command prints where it resumes (four processes on two cores):
    runs/fsdp/epoch-0003: 3 of 5 epochs are done
    epoch 4/5  loss 0.0952  train 97.09%  test 96.52%  34.88 s  1,717 images/s

After each epoch, all ranks write their shards to a folder, so none needs memory for the whole
model. All nodes must see this folder. (`dcp` in the code is `torch.distributed.checkpoint`.) Resume
only from folders of your own: dcp unpickles a part of what it loads, which can run code.

The file .metadata has the shape of each whole tensor, and the offset of each shard in it. When a
run resumes, each rank reads what overlaps its new shards, so the number of ranks may differ. (If
several ranks hold the same tensor, only one writes it.) The flags on which the numbers depend must
stay the same.

With `--async_save`, training does not wait for the disk: dcp copies the shards to CPU memory, and a
thread writes this copy while the next epoch trains.

Only dcp reads such a folder. All other programs want one file of whole tensors. With `--savefile`,
the ranks gather one tensor after the other, and rank 0 writes a file that a plain model and
optimizer can load. With `--load`, a run starts from this file, or from one that
`distributed_data_parallel.py --savefile` wrote. Rank 0 reads it, and sends its tensors one by one.

Try breaking it, in a copy beside it:
  1. Delete the file .metadata in the newest folder. Where does the next run resume, and why?
  2. Leave out `process_group=group`, and run it with `--async_save`. What goes wrong, and why?
  3. After `model = ...`, add dropout: `model.stage1.append(torch.nn.Dropout())`. Train two epochs
     without a break, and two with a break after the first. Then comment out the second
     `torch.manual_seed(...)`, and do the same. Compare the losses.
  4. Leave out the line with `by_name`, and load a file that DDP has written. Is there an error?
  5. In `save_file`, leave out `full_state_dict=True`. What is in the file?

Builds on: fully_sharded_data_parallel.py
This is the last lesson of this part. The next part begins with `manual_pipeline.py`.
"""

import os
import shutil
import sys
import time
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
    set_state_dict,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model

# The numbers depend on these flags, so a run must be resumed with the same ones.
MUST_AGREE = ("model", "heads", "tokens", "dataset", "batch_size", "lr", "seed", "double")


def save(folder, epoch, model, optimizer, args, group=None):
    """Write the shards of all ranks. With a group, a thread does it, whose future is returned.

    If there is no optimizer state yet, get_state_dict() makes a step: call this after one of yours.
    """
    # NEW: each rank gets its own shards, under the parameters' names.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": epoch}
    state["flags"] = [getattr(args, flag) for flag in MUST_AGREE]
    # Add what else the next step depends on, such as scheduler.state_dict().
    if group is None:
        dcp.save(state, checkpoint_id=folder)  # NEW: all ranks write at the same time
        return None
    # NEW: returns as soon as the shards are copied. Then the next step may change them.
    return dcp.async_save(state, checkpoint_id=folder, process_group=group)


def load(folder, model, optimizer):
    """Load a checkpoint, however many ranks wrote it. Returns its epoch, and the flags."""
    # NEW: dcp.load() writes into the tensors of a dict, so fill it with this rank's shards.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # The folder has no state of parameters without gradients, which get_state_dict() makes up here.
    missing = take_out_missing(optimizer_state, folder)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": None, "flags": None}
    dcp.load(state, checkpoint_id=folder)
    optimizer_state["state"] |= missing
    set_state_dict(  # also sets the learning rate
        model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state
    )
    return state["epoch"], state["flags"]


def save_file(args, epoch, model, optimizer):
    """Write one file with whole tensors. If this fails, an older file stays."""
    # NEW: full_state_dict gathers the shards of one tensor after the other. cpu_offload moves each
    # whole tensor to the CPU of rank 0. The other ranks keep none, and get empty dicts.
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        state = {"model": model_state, "optimizer": optimizer_state}
        state |= {"epoch": epoch, "args": vars(args)}
        unfinished = Path(f"{args.savefile}.unfinished")
        try:
            with open(unfinished, "wb") as file:  # so that a full disk gives a clear error
                torch.save(state, file)
            os.replace(unfinished, args.savefile)
        finally:
            unfinished.unlink(missing_ok=True)  # left over only after an error


def load_file(path, model, optimizer):
    """Load one file, which only rank 0 reads. Returns how many epochs are done."""
    state = {"model": {}, "optimizer": {}, "epoch": None}
    if dist.get_rank() == 0:
        # With mmap=True, a tensor is read only when it is used.
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        state["optimizer"] = by_name(state["optimizer"], model, optimizer)
    # NEW: full_state_dict says that the tensors are whole. broadcast_from_rank0 says that only rank
    # 0 has them. It sends one after the other, and each rank keeps its shard.
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    done = [state["epoch"]]
    dist.broadcast_object_list(done)
    return done[0]


def by_name(optimizer_state, model, optimizer):
    """Return the state of an optimizer with the parameters' names in place of their numbers."""
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    named = {"state": {}, "param_groups": []}
    groups = optimizer_state["param_groups"]
    for group, own_group in zip(groups, optimizer.param_groups, strict=True):
        names = [name_of[parameter] for parameter in own_group["params"]]
        named["param_groups"].append(group | {"params": names})
        for name, number in zip(names, group["params"], strict=True):
            key = name if isinstance(number, str) else number  # save_file() has written names
            # A parameter that has got no gradient has no state.
            named["state"][name] = optimizer_state["state"].get(key, {})
    return named


def train(args):
    """Train a sharded model, from its newest checkpoint if there is one, and write checkpoints."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)  # the same on all ranks
    model = make_model(args)
    shard(model, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    done = 0
    if args.load:
        done = load_file(args.load, model, optimizer)
        if rank == 0:
            print(f"{args.load}: {done} of {args.epochs} epochs are done", flush=True)
    if args.run_dir:
        done = resume(args, model, optimizer) or done  # a checkpoint in run_dir wins over the file
    group = None
    if args.async_save:
        # NEW: the threads send messages, too, which must not mix with those of training. So they
        # have a group of their own. It uses gloo, because the copies are in CPU memory.
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=args.timeout))
    writing = None  # the future of a checkpoint that a thread writes
    for epoch in range(done, args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
        if writing:
            writing.result()  # NEW: waits for the thread, and raises its error
        if args.run_dir:
            keep_two(args.run_dir)
            folder = f"{args.run_dir}/epoch-{epoch + 1:04}"
            writing = save(folder, epoch + 1, model, optimizer, args, group)
    if writing:
        writing.result()
    if args.savefile:
        save_file(args, max(done, args.epochs), model, optimizer)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def resume(args, model, optimizer):
    """Load the newest checkpoint, if there is one. Returns how many epochs are done."""
    newest = [None]
    if dist.get_rank() == 0:
        folders = complete(args.run_dir)
        newest = [folders[-1] if folders else None]
    # NEW: rank 0 chooses for all ranks, because nodes may see a new folder at different times.
    dist.broadcast_object_list(newest)
    path = newest[0]
    if path is None:
        return 0
    try:
        done, before = load(path, model, optimizer)
    except dcp.CheckpointException as error:  # has the traceback of each rank
        error.add_note(f"{path} cannot be loaded: use the flags with which it was written,")
        error.add_note("or move it away, and the run resumes from the checkpoint before.")
        raise
    for flag, value in zip(MUST_AGREE, before, strict=True):
        if value != getattr(args, flag):
            was = f"{path} was written with --{flag} {value}"
            raise ValueError(f"{was}: use the same flags, or a different --run_dir")
    if dist.get_rank() == 0:
        print(f"{path}: {done} of {args.epochs} epochs are done", flush=True)
    return done


def complete(run_dir):
    """Return the folders of complete checkpoints, the newest one last."""
    # NEW: the file .metadata is written last, so a folder without it is not complete.
    folders = [file.parent for file in Path(run_dir).glob("epoch-*/.metadata")]
    numbered = [folder for folder in folders if folder.name[6:].isdigit()]
    return [str(folder) for folder in sorted(numbered, key=lambda folder: int(folder.name[6:]))]


# You can stop here. What follows keeps order, shards the model as before, and trains for one epoch.


def take_out_missing(optimizer_state, folder):
    """Take out the state of parameters that have none in a checkpoint. Returns it, empty, by name.

    They never got a gradient. (get_state_dict() has made a step with zero gradients, which creates
    state for all, and counts as a step. Loading corrects this.)
    """
    saved = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    if not any(key.startswith("optimizer.") for key in saved):
        raise KeyError(f'{folder} has nothing under the key "optimizer"')
    averages = optimizer_state["state"]
    known = {key.removeprefix("optimizer.state.").rpartition(".")[0] for key in saved}
    missing = [name for name in averages if name not in known]
    for name in missing:
        del averages[name]
    return {name: {} for name in missing}


def keep_two(run_dir):
    """Delete all complete checkpoints but the last two. With the next one, there are three."""
    if dist.get_rank() == 0:
        for old in complete(run_dir)[:-2]:
            shutil.rmtree(old)


def shard(model, args):
    """Shard each layer, and then the whole model."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
    # NEW: dropout, if there is any, draws different numbers on each rank and in each epoch. With
    # `args.seed + rank` alone, a resumed run would draw those of the first epoch again.
    torch.manual_seed(args.seed + epoch * world_size + rank)
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, images = run_epoch(model, bar, device, optimizer)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    if rank == 0:
        digits = 12 if args.double else 4
        print(
            f"{title}  loss {loss / images:.{digits}f}"
            f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
            f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
            flush=True,
        )


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    folder = "folder for sharded checkpoints; resumes from its newest"
    add("--run_dir", type=flags.new_folder, help=folder)
    add("--async_save", action="store_true", help="write them while the next epoch trains")
    add("--load", type=os.path.expanduser, help="start from this file of whole tensors")
    add("-s", "--savefile", type=flags.new_file, help="one file with whole tensors, at the end")


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit each other, or the number of ranks."""
    parser.check_batch(args.batch_size, world_size)
    if args.async_save and not args.run_dir:
        parser.error("--async_save writes to --run_dir, which is missing")


# ---------- Unchanged from fully_sharded_data_parallel.py ----------
# You know what follows: join(), run_epoch() and main(). If you copy this lesson, copy this, too.


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
