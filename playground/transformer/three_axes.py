r"""Three axes: data, context and tensor parallelism of a transformer, on one mesh of ranks.

Run it:
    torchrun --standalone --nproc-per-node 8 playground/transformer/three_axes.py
    torchrun --standalone --nproc-per-node 4 \
        playground/transformer/three_axes.py --mesh 1x2x2 --fsdp --clip 1

Without --clip, it prints the same numbers as `single_gpu.py --model transformer`, up to rounding;
with --double all twelve digits agree. It prints first:
    8 ranks, gloo, cpu

Each axis does what an earlier lesson does, and its messages stay in its own groups. The ring comes
from `context_parallel.py`, and SplitBlock from `sequence_parallel.py`. The ranks of a dp group have
different images, those of a cp group different tokens, and those of a tp group different heads and
columns of the MLP. With --mesh 2x2x2, ranks 0 and 4 are a dp group:

            dp 0                dp 1
            tp 0      tp 1      tp 0      tp 1
    cp 0    rank 0    rank 1    rank 4    rank 5
    cp 1    rank 2    rank 3    rank 6    rank 7

Along an axis, a gradient is summed, private to each rank, or already the same everywhere:
    gradient of                 along dp    along cp                    along tp
    a shard of a split layer    summed      summed                      private
    all other parameters        summed      summed                      the same
    the input of a pair         private     private                     summed (BeginPair)
    a rank's keys and values    private     summed around the ring      private
`playground/watch.py` in front of the script counts the messages along each axis.

Try breaking it, in a copy beside it:
  1. In compute_gradients, delete `if not has_last:` and the line below it. What is trained?
  2. In train, leave the cp group out of `groups`. Is there an error?
  3. With --clip 0.1, leave out the all_reduce along tp. What differs in a tp group then?

Builds on: context_parallel.py
This is the last lesson. `README.md` says which kind of parallelism is right for which model.
"""

import math
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder

# NEW: from the lessons before.
from context_parallel import RingAttention, split_tokens, zigzag
from sequence_parallel import SplitBlock, split_by_dtensor, split_by_hand

from common import flags
from common.data import fetch, loaders
from common.models import HEADS, TOKENS, WIDTH, make_model


def shards_of(model):
    """Return the parameters of which each rank of a tp group has a shard, after split_by_hand()."""
    split = []
    for layer in (*model.stage1, *model.stage2):
        if isinstance(layer, SplitBlock):
            # NEW: attention and MLP now have split parameters only. The others are outside of them.
            split += [*layer.attention.parameters(), *layer.mlp.parameters()]
    return split


def shard(model, mesh):
    """Shard each layer over a mesh of one axis: ranks that have different images or tokens."""
    # PyTorch 2.15 warns that the outputs of layers are views, which must not be changed in place.
    # No function of this lesson changes them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    for layer in (*model.stage1, *model.stage2):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_split(parameter):
    """Return whether a parameter, a DTensor, is split along tp.

    split_by_dtensor() has made DTensors of the parameters of split layers, so they have the axes
    dp_cp and tp. fully_shard has made those of all other parameters, which have dp_cp only.
    """
    on_both_axes = parameter.device_mesh.ndim == 2
    # NEW: the bias of a row-parallel layer is on both axes, too, but along tp it is whole.
    return on_both_axes and parameter.placements[1].is_shard()


def add_up_gradients(model, groups):
    """Add up the gradients over the dp group and the cp group of this rank."""
    for parameter in model.parameters():
        for group in groups:
            # NEW: the sum over all images and tokens. The ranks of a tp group have the same images
            # and tokens, so there is nothing to add up over the tp group.
            dist.all_reduce(parameter.grad, group=group)


def compute_gradients(model, images, labels, batch_size, has_last, factor, groups):
    """Compute the gradients of a global batch of `batch_size` images.

    Multiplies the loss by `factor`, and adds the gradients up over `groups`. Returns the logits of
    this rank's last token.
    """
    logits = model(images)
    # NEW: a sum, divided by the number of all images. So the gradients of all ranks are added up,
    # and it does not matter how many images or tokens a rank has.
    loss = F.cross_entropy(logits, labels, reduction="sum") / batch_size
    if not has_last:
        loss = loss * 0  # the class is read from the last token, which is on another rank
    (loss * factor).backward()
    add_up_gradients(model, groups)
    return logits.detach()


def sum_of_squares(parameters):
    """Return the sum of the squares of those numbers of the gradients that this rank has."""
    total = 0
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        total = total + gradient.square().sum()
    return total


def clip_gradients(split, whole, limit, tp_group, shard_group=None):
    """Scale all gradients, so that the norm of the whole model's gradient is at most `limit`.

    The norm is the root of the sum of all squares. Along tp, only the squares of split layers'
    shards are added up, because the rest is equal on all ranks. --fsdp shards all parameters over
    dp and cp as one axis (dp_cp), so all squares are then added up over it as well.

    Args:
        split: the parameters of which each rank of the tp group has its own shard.
        whole: the other parameters.
        limit: the largest norm.
        tp_group: of this rank.
        shard_group: the ranks over which fully_shard has sharded all parameters; None: it has not.
    """
    # NEW: squares are added up over the axes along which the ranks have different numbers.
    squares = sum_of_squares(split)
    dist.all_reduce(squares, group=tp_group)
    squares = squares + sum_of_squares(whole)  # equal on all ranks of the tp group
    if shard_group is not None:
        dist.all_reduce(squares, group=shard_group)
    norm = squares.sqrt().item()
    factor = min(1, limit / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_ does
    for parameter in (*split, *whole):
        parameter.grad *= factor


def train(args):
    """Split a transformer along the three axes, and train it."""
    _, device = join(args)
    dp_size, cp_size, tp_size = map(int, args.mesh.split("x"))
    names = ("dp", "cp", "tp")
    mesh = dist.init_device_mesh(device.type, (dp_size, cp_size, tp_size), mesh_dim_names=names)
    # NEW: the same ranks in the same order, but dp and cp are one axis. --fsdp shards over it, and
    # the sums of an epoch are added up over it. The tp groups have the same ranks as in `mesh`.
    names = ("dp_cp", "tp")
    flat = dist.init_device_mesh(device.type, (dp_size * cp_size, tp_size), mesh_dim_names=names)
    for group in (*mesh.get_all_groups(), *flat.get_all_groups()):
        # The groups of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
        group.set_timeout(timedelta(seconds=args.timeout))
    tp_group = flat.get_group("tp")
    dp_cp_group = flat.get_group("dp_cp")
    dp_rank = mesh.get_local_rank("dp")
    # NEW: ranks that differ only along cp or tp read the same images.
    train_loader, test_loader = loaders(args, dp_rank, dp_size)
    torch.manual_seed(args.seed)
    model = make_model(args)
    places = zigzag(args.tokens, cp_size)
    # NEW: the ring's messages stay in the cp group. The splits below change parameters inside
    # attention, but not its forward(), so the ring stays. It then sends the keys and values of this
    # rank's heads only: the bytes are divided by the number of ranks along tp.
    split_tokens(model, RingAttention.apply, places, mesh.get_group("cp"))
    if args.fsdp:
        # NEW: in this order, because fully_shard accepts what is split, but parallelize_module does
        # not accept shards. In a larger program, the stages of a pipeline come first, then tensor
        # parallelism, activation checkpointing, torch.compile, and fully_shard last.
        split_by_dtensor(model, flat["tp"], sequence=False)
        shard(model, flat["dp_cp"])  # this also moves the shards to the device
        shard_group = dp_cp_group
        # NEW: fully_shard adds gradients up, and divides them by its number of ranks. So the loss
        # is multiplied by this number, and no group is left to add them up over.
        factor = dp_size * cp_size
        groups = []
        split = [parameter for parameter in model.parameters() if is_split(parameter)]
    else:
        # NEW: the messages of the pairs stay in the tp group. With sequence=False, BeginPair gives
        # each rank whole gradients, so none is left to add up over the group.
        split_by_hand(model, sequence=False, group=tp_group)
        split = shards_of(model)
        shard_group = None
        factor = 1
        groups = [mesh.get_group("dp"), mesh.get_group("cp")]
        model = model.to(device)
    ids = {id(parameter) for parameter in split}
    whole = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    torch.manual_seed(args.seed + flat.get_local_rank("dp_cp"))  # dropout is equal along tp only
    last_places = [place[-1].item() for place in places]
    has_last = last_places[mesh.get_local_rank("cp")] == max(last_places)
    # foreach=False updates one parameter after the other, because with --fsdp they are DTensors on
    # different meshes.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, foreach=False)

    def gradients_of(images, labels):
        """Compute and clip the gradients of a batch. Returns the logits of the last token."""
        logits = compute_gradients(model, images, labels, args.batch_size, has_last, factor, groups)
        if args.clip > 0:
            clip_gradients(split, whole, args.clip, tp_group, shard_group)
        return logits

    model.gradients_of = gradients_of  # for run_epoch(), like the next two
    model.has_last = has_last
    model.dp_cp_group = dp_cp_group
    fit(model, optimizer, train_loader, test_loader, device, args)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer. Returns three sums over all images."""
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if optimizer is not None:
            optimizer.zero_grad()
            logits = model.gradients_of(images, labels)
            optimizer.step()
        else:
            with torch.no_grad():
                logits = model(images)
        if model.has_last:  # the logits of the other ranks are from earlier tokens
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += labels.numel()
    # NEW: over dp and cp only, because the ranks of a tp group have the same sums.
    dist.all_reduce(sums, group=model.dp_cp_group)
    return sums.tolist()


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.set_defaults(model="transformer")
    add = parser.add_argument
    add("--mesh", help="ranks along dp, cp and tp; default: if possible, 2 along tp and cp")
    add("--fsdp", action="store_true", help="fully_shard over dp and cp, and DTensors along tp")
    add("--clip", type=flags.rate, default=0.0, help="the largest norm of the gradients; 0: any")


def check_flags(parser, args, world_size):
    """Choose a mesh if none is given, and refuse what its ranks cannot split."""
    if args.model != "transformer":
        parser.error(f"--model {args.model} has no tokens and heads: use --model transformer")
    if args.mesh is None:
        tp_size = 2 if world_size % 2 == 0 else 1
        cp_size = 2 if world_size % 4 == 0 else 1
        args.mesh = f"{world_size // cp_size // tp_size}x{cp_size}x{tp_size}"
    sizes = [int(size) for size in args.mesh.split("x") if size.isdecimal()]
    as_read = "x".join(map(str, sizes))
    if len(sizes) != 3 or math.prod(sizes) != world_size or as_read != args.mesh:
        wrong = f"--mesh {args.mesh} does not have 3 axes and {world_size} processes"
        parser.error(f"{wrong}: use --mesh {world_size}x1x1, or leave it out")
    dp_size, cp_size, tp_size = sizes
    args.tokens = args.tokens or TOKENS
    heads = args.heads or HEADS
    parser.check_batch(args.batch_size, dp_size)
    if args.tokens < cp_size:
        enough = [count for count in range(cp_size, 785) if 784 % count == 0]
        wrong = f"--tokens {args.tokens} are fewer than the {cp_size} ranks along cp"
        parser.error(f"{wrong}: use --tokens {enough[0]}")
    if heads % tp_size:
        nearest = max(1, round(heads / tp_size)) * tp_size
        width = args.width or WIDTH["transformer"]
        width = max(1, round(width / nearest)) * nearest
        wrong = f"--heads {heads} cannot be divided by the {tp_size} ranks along tp"
        parser.error(f"{wrong}: use --heads {nearest} --width {width}")


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), fit() and main(). If you copy this lesson, copy it, too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device = torch.device(args.device)
    gpu = None
    if args.device != "cpu":
        gpu = device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    # The address, the rank and the world size are in the environment.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    for flag in vars(args).keys() - {"data_dir"}:
        values = {str(each.get(flag)) for each in everyone}
        if len(values) > 1:
            dist.destroy_process_group()
            raise ValueError(f"the nodes differ in --{flag}: {', '.join(sorted(values))}")
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


def fit(model, optimizer, train_loader, test_loader, device, args):
    """Train and test, and print one line for each epoch."""
    rank = dist.get_rank()
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
        start = time.perf_counter()
        # Only rank 0 shows a bar, and only in a terminal.
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)
        loss, correct, images = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        speed = len(train_loader) * args.batch_size / seconds
        # A wrapper such as DDP may send messages in forward(), so test the model that it wraps.
        plain = getattr(model, "module", model)
        _, test_correct, test_images = run_epoch(plain, test_loader, device)
        if rank == 0:
            digits = 12 if args.double else 4
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss / images:.{digits}f}"
                f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
                f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
                flush=True,
            )


@record  # writes the traceback of an error to a file, and torchrun's report shows it
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.ranks(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_torchrun(args)  # an error of one line if torchrun has not started this
    check_flags(parser, args, world_size=int(os.environ["WORLD_SIZE"]))
    # There is no group yet, so a download may take long. One process of each node does it.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
