"""Mixed precision: compute in 16 bits, and keep parameters and Adam's state in 32 bits.

bfloat16 has the range of float32, but only two to three digits. float16 has a digit more, but a
small range: from 6e-8 to 65,504. In float16, a gradient of 1e-9 becomes 0. So a GradScaler
multiplies the loss by 65,536, and with it all gradients. Before the optimizer's step, it divides
them by this factor. If a gradient has become infinite, it skips the step and halves the factor.
bfloat16 needs no GradScaler, because 1e-9 is within its range. On GPUs, 16 bits are much faster. On
a CPU, this depends on the processor, so the lesson shows numbers and not speed.

torch.autocast computes matrix products and attention in 16 bits, from converted copies of their
inputs and parameters. The parameters themselves stay in float32, because bfloat16 would lose Adam's
small steps: in bfloat16, 1 + 0.001 is 1. For cross_entropy, autocast converts logits to float32.
bfloat16 plus float32 is float32, and the positions are float32. So embedded tokens are float32, and
so are the sums in a block and the inputs of LayerNorm.

With FSDP, a MixedPrecisionPolicy takes the place of autocast. It works by layers: it converts their
inputs, and their shards before they are gathered. So all of a layer computes in bfloat16, LayerNorm
too. In a step, a parameter is gathered twice, with 2 bytes, and its gradient is reduced once, with
4 bytes (reduce_dtype). These 8 bytes, times (n-1)/n, are also what DDP's all_reduce sends.

Clipping scales all gradients down if their norm is too large. With FSDP, a rank has shards of them,
which are DTensors. So clip_grad_norm_ adds up squares over all ranks, and all ranks must call it.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/mixed_precision.py
    torchrun --standalone --nproc-per-node 2 playground/mixed_precision.py --sharded --clip 1

It prints these lines, among others, with --dataset digits --batch_size 120, on a CPU. The errors in
the table are relative. In its last but one row, parameters are in bfloat16, too. A layer's dtype is
that of its output, and softmax is that of the logits:
    a gradient of 1e-9 in torch.float16, loss x 1: 0
    a gradient of 1e-9 in torch.float16, loss x 65536: 1e-09
    error against float64   loss     gradients
    float32                 3e-09    2e-07
    bfloat16, autocast      1e-04    5e-03
    bfloat16, everything    1e-03    1e-02
    float16, autocast       3e-05    8e-04
    bfloat16: Linear, Attention, GELU, LastToken, logits, softmax
    float32: Tokens, LayerNorm, Block, loss, parameters, gradients, Adam's averages
    bytes sent by all_reduce: 110,504 (predicted: 110,504)
With --sharded --clip 1, the norm of the last gradients is 1, and that of rank 0's shards is less.

Try breaking it, in a copy:
  1. Write `make_model(args).bfloat16()`. With --lr 1e-5, what changes in the losses and dtypes?
  2. Write `reduce_dtype=torch.bfloat16`, and use --sharded. Which bytes change?
  3. Comment out `scaler.unscale_(optimizer)`. With --precision float16 --clip 1, is there an error?

The next lesson, activation_checkpointing.py, saves the memory of activations.
"""

import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import equal_batches, fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.precision import show_bytes, show_dtypes, show_errors

NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}  # the kinds with 16 bits


def small_gradient(dtype, factor=1.0):
    """Return a gradient of 1e-9, computed in a dtype. The loss is multiplied by a factor."""
    parameter = torch.ones((), requires_grad=True)
    output = parameter.to(dtype)  # as autocast converts a parameter
    loss = output.float() * 1e-9  # the gradient of output has the dtype of output
    (loss * factor).backward()
    return parameter.grad.item() / factor


def shard(layers, model, mesh, narrow):
    """Shard each layer, and then the whole model. Layers compute in the dtype `narrow`."""
    if narrow is None:
        inside = MixedPrecisionPolicy()  # converts nothing
        outside = inside
    else:
        # NEW: each shard is converted before it is gathered. Gradients are computed in the same
        # dtype, but added up over the ranks in float32. (Without reduce_dtype, the dtype of the
        # sum depends on PyTorch's version.)
        inside = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
        # NEW: the output of the whole model is float32, so the loss is computed in float32.
        outside = MixedPrecisionPolicy(output_dtype=torch.float32)
    for layer in layers:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=inside)
    fully_shard(model, mesh=mesh, mp_policy=outside)


def gradient_norms(parameters):
    """Return the norm of all gradients, and the norm of what this rank has of them."""
    parameters = list(parameters)
    norm = clip_grad_norm_(parameters, math.inf)  # only the norm: nothing is larger than infinity
    own = []
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        own.append(gradient)
    if isinstance(norm, DTensor):
        # NEW: the norm over all ranks. (In PyTorch 2.9, norm.to_local() would be that of this
        # rank's shards only.)
        norm = norm.full_tensor()
    return norm.item(), get_total_norm(own).item()


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


def run_epoch(model, loader, device, autocast, optimizer=None, scaler=None, clip=0.0):
    """Train, or only test if there is no optimizer. Returns sums over the images of all ranks."""
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        # NEW: only the forward pass is inside. backward() uses the dtypes of the forward pass.
        with torch.set_grad_enabled(model.training), autocast:
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            # NEW: only float16 needs the scaler. Otherwise it is disabled, and changes nothing.
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # NEW: divides, because clipping needs the true norm
            if clip:
                clip_grad_norm_(model.parameters(), clip)  # NEW: by the norm over all ranks
            # NEW: an infinite gradient makes all ranks skip the step. With DDP, all ranks have the
            # same gradients. With shards, an all_reduce in unscale_() has told them all.
            scaler.step(optimizer)
            scaler.update()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch. Then show the dtypes and the messages."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    # FSDP's forward() gathers, so all ranks must call it the same number of times, also in a test.
    test_loader = equal_batches(test_loader.dataset, rank, world_size)
    images, labels = (each.to(device) for each in next(iter(train_loader)))
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    if rank == 0:
        for dtype, factor in ((torch.bfloat16, 1), (torch.float16, 1), (torch.float16, 65536)):
            gradient = small_gradient(dtype, factor)
            print(f"a gradient of 1e-9 in {dtype}, loss x {factor}: {gradient:.3g}", flush=True)
        show_errors(model, images, labels)
    narrow = NARROW.get(args.precision)  # None: nothing is converted
    if args.sharded:
        mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks in a row
        mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
        shard([*model.stage1, *model.stage2], model, mesh, narrow)
        wrapped = model  # fully_shard has changed the model itself
    else:
        wrapped = DistributedDataParallel(model)
    # NEW: autocast is disabled with FSDP, because the policy converts parameters and inputs.
    enabled = narrow is not None and not args.sharded
    autocast = torch.autocast(device.type, dtype=narrow, enabled=enabled)
    scaler = torch.amp.GradScaler(device.type, enabled=narrow is torch.float16)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(wrapped, progress, device, autocast, optimizer, scaler, args.clip)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device, autocast)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    norm, own = gradient_norms(model.parameters())
    if rank == 0:
        print(f"norm of the last gradients: {norm:.4f}, of what rank 0 has: {own:.4f}", flush=True)
    show_dtypes(model, optimizer, autocast, images, labels)
    show_bytes(wrapped, autocast, images, labels, args.sharded, narrow)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del wrapped
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    parser.set_defaults(model="transformer")
    add = parser.add_argument
    add("--precision", choices=[*NARROW, "full"], help="full: convert nothing; default: bfloat16")
    add("--sharded", action="store_true", help="FSDP with a policy, in place of DDP with autocast")
    add("--clip", type=float, default=0.0, help="largest norm of the gradients; 0: any")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    if args.double and args.precision in NARROW:
        parser.error(f"--double computes in float64: leave out --precision {args.precision}")
    if args.precision is None:
        args.precision = "full" if args.double else "bfloat16"
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
