r"""FSDP in a long run: sharded checkpoints, bfloat16, clipping and dropout.

Sharded checkpoints: with --run_dir, every rank writes its shards to a folder after each epoch, so
no rank needs memory for the whole model. A run that is started again resumes from the newest
checkpoint. The number of ranks may be different then, because each rank looks up which files
contain its new shards. torch.distributed.checkpoint (dcp) does this.

Export: with --savefile, the ranks gather parameters and Adam's averages, one tensor at a time. Rank
0 keeps them on its CPU and writes one file, which any lesson's model and optimizer can load.

bfloat16: with --precision bf16, the layers are gathered in this format and compute in it. It has 2
bytes for each number. Shards, mean gradients and Adam's averages keep their 4 bytes, because small
updates to a number with 2 bytes would be rounded away.

Clipping: with --clip C, the gradients are scaled down if their norm is above C. The norm is taken
over the gradients of all parameters, but a rank has only shards of them. Because the gradients are
DTensors, clip_grad_norm_() adds up the squares over all ranks.

Dropout: the ranks draw the same initial parameters, but they must drop different neurons, because
they have different images. So each rank seeds again after the model is made, with a different seed
in each epoch. With the same number of ranks, a resumed run then drops the same neurons as a run
without a break.

Run it, then resume it with more ranks, and export the result:
    torchrun --standalone --nproc-per-node 2 playground/fully_sharded_checkpoints.py \
        --run_dir runs/fsdp --clip 1
    torchrun --standalone --nproc-per-node 4 playground/fully_sharded_checkpoints.py \
        --run_dir runs/fsdp --clip 1 --epochs 5 --savefile checkpoints/fsdp.pt

It prints where it resumes, and the mean norm before clipping. This is the second command, with four
processes on two cores (times will differ):
    runs/fsdp/epoch-0003: 3 of 5 epochs are done
    epoch 4/5  loss 0.0898  train 97.26%  test 96.84%  35.33 s  1,695 images/s  norm 0.8955

Try breaking it, in a copy:
  1. Comment out the second `torch.manual_seed(...)`. With --model cnn --dropout 0.5, train two
     epochs without a break, and then two with a break after the first. Compare the losses.
  2. Write `model.bfloat16()` before `shard(model, args)`, so that the shards are in bfloat16 as
     well. Compare the losses with --dataset digits --precision bf16 --lr 1e-4 --epochs 10.
  3. Delete the file .metadata in the newest folder. Where does the next run resume, and why?

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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet

# The numbers depend on these flags, so a run must be resumed with the same ones.
MUST_AGREE = ["model", "width", "layers", "dataset", "batch_size", "lr", "seed", "double"]
MUST_AGREE += ["precision", "clip", "dropout"]


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


def shard(model, args):
    """Keep only a shard of every parameter on each rank. A layer gathers them when it computes."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))  # all ranks in a row
    # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    own_dtype = torch.float64 if args.double else torch.float32
    compute_dtype = torch.bfloat16 if args.precision == "bf16" else own_dtype
    # NEW: the layers are gathered in one dtype, and they compute in it. The gradients are averaged
    # in a different one.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=own_dtype)
    for layer in (*model.stage1, *model.stage2):
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    # NEW: the model returns its output in the dtype in which the loss is computed.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=own_dtype))


def newest_checkpoint(args):
    """Return the path of the newest complete checkpoint, or None if there is none."""
    # dcp.save() writes the file .metadata last, so a folder without it is not complete.
    complete = sorted(Path(args.run_dir).glob("epoch-*/.metadata"))
    if not complete:
        return None
    return str(complete[-1].parent)


def read(path, state):
    """Fill the tensors of a state, in place, with the values of a sharded checkpoint."""
    try:
        dcp.load(state, checkpoint_id=path)
    except dcp.CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))  # the error of one rank, and its traceback
        reason = traceback.format_exception_only(failure)[-1].splitlines()[0]
        message = f"error: {path} is damaged: delete it to resume from an older one ({reason})"
        sys.exit(message if dist.get_rank() == 0 else 1)


def resume(path, args, model, optimizer):
    """Load a checkpoint, however many ranks wrote it. Returns how many epochs are done."""
    rank = dist.get_rank()
    # read() replaces these values. It reads only what the dict has already, so they must be there.
    progress = {"epoch": 0, "args": dict(vars(args))}
    read(path, progress)
    for name in MUST_AGREE:
        before = progress["args"][name]
        now = getattr(args, name)
        if before != now:
            message = f"error: {path} was trained with {name}={before}, not {now}:"
            message += " use the same flags, or another --run_dir"
            sys.exit(message if rank == 0 else 1)
    # NEW: get_state_dict returns the shards of this rank, and read() writes into them. To create
    # Adam's state, get_state_dict takes an empty step, which Adam counts. read() overwrites this
    # count. In a new run nothing would overwrite it, so do not call get_state_dict there before the
    # first step.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    read(path, state)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    if rank == 0:
        print(f"{path}: {progress['epoch']} of {args.epochs} epochs are done", flush=True)
    return progress["epoch"]


def run_epoch(model, loader, device, optimizer=None, clip=0.0):
    """Train, or only test if there is no optimizer.

    Returns four sums over the images of all ranks: the loss, the number classified correctly, the
    number of images, the norm of the gradients.
    """
    model.train(optimizer is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            if clip:
                # NEW: the norm is over the shards of all ranks, and it is a DTensor as well. It is
                # weighted by the images, because train() divides the sum by their number.
                norm = clip_grad_norm_(model.parameters(), clip)
                sums[3] += norm.full_tensor() * len(labels)
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
    torch.manual_seed(args.seed)  # equal on all ranks, because each keeps a shard of what it draws
    model = make_model(args)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = args.dropout  # in the other lessons it is 0
    # This also moves the shards to the device, one layer after the other.
    shard(model, args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    # NEW: rank 0 chooses the checkpoint for all ranks. If every rank looked into a network folder,
    # the nodes might see different files for a few seconds.
    chosen = [None]
    if rank == 0 and args.run_dir:
        chosen = [newest_checkpoint(args)]
    dist.broadcast_object_list(chosen, device=device)
    path = chosen[0]
    done = 0  # epochs
    if path:
        done = resume(path, args, model, optimizer)

    # Epochs that are done are not repeated.
    for epoch in range(done, args.epochs):
        train_loader.sampler.set_epoch(epoch)
        # NEW: different on each rank and in each epoch, so each rank drops different neurons.
        torch.manual_seed(args.seed + epoch * world_size + rank)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        *trained, norm_sum = run_epoch(model, progress, device, optimizer, args.clip)
        seconds = time.perf_counter() - start
        *tested, _ = run_epoch(model, test_loader, device)
        line = epoch_line(args, epoch, seconds, trained, tested)
        if args.clip:
            images_trained = trained[2]
            line += f"  norm {norm_sum / images_trained:.4f}"
        if rank == 0:
            print(line, flush=True)
        if args.run_dir:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            state |= {"epoch": epoch + 1, "args": vars(args)}
            # NEW: each rank writes its shards, all at the same time.
            dcp.save(state, checkpoint_id=f"{args.run_dir}/epoch-{epoch + 1:04}")
    if args.savefile:
        # All ranks gather one tensor after the other, and rank 0 keeps it on its CPU.
        on_rank_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model_state, optimizer_state = get_state_dict(model, optimizer, options=on_rank_0)
        state = {"model": model_state, "optimizer": optimizer_state}
        state |= {"epoch": max(done, args.epochs), "args": vars(args)}
        if rank == 0:
            unfinished = f"{args.savefile}.{os.getpid()}"  # no other job writes to this file
            torch.save(state, unfinished)
            # The last checkpoint stays whole even if this run is killed while it writes.
            os.replace(unfinished, args.savefile)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    add("--precision", choices=["bf16"], help="gather layers and compute in bfloat16")
    add("--clip", type=float, default=0.0, help="largest norm of the gradients; 0: any")
    add("--dropout", type=float, default=0.0, help="fraction of the hidden neurons to drop (cnn)")
    add("--run_dir", help="folder for sharded checkpoints; resumes from the newest in it")
    add("-s", "--savefile", help="write one plain checkpoint to this file at the end")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    if not 0 <= args.dropout < 1:
        parser.error(f"--dropout {args.dropout}: must be 0 or more, and below 1")
    if args.dropout and args.model != "cnn":
        parser.error(f"--dropout {args.dropout}: only the CNN has it, so add --model cnn")
    # The ranks of a node fetch the data one at a time, so it is downloaded once.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
