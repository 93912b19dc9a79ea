r"""Mixed precision: compute in 16 bits, and keep parameters and optimizer state in 32 bits.

Run it, first with DDP:
    torchrun --standalone --nproc-per-node 2 playground/transformer/mixed_precision.py

It prints, on a CPU (the dtype of a layer is that of its output):
    epoch 1/3  loss 0.5946  train 81.69%  test 93.40%  21.81 s  2,747 images/s
    bfloat16: Linear, Attention, GELU, LastToken, Transformer
    float32: Tokens, LayerNorm, Block, Autocast, parameters, gradients, optimizer state

In float32 (`--precision full`), the loss is 0.5944. On GPUs, products of matrices are much faster
in 16 bits, and most activations take half of the memory. On a CPU, the speed depends on its kind.

bfloat16 has the range of float32, but only two to three digits: 1 + 0.001 is 1. A small step of the
optimizer would often change nothing, so the parameters stay in float32, and each layer computes
with converted copies (autocast). float16 has one digit more, and a small range, from 6e-8 to
65,504: a gradient of 1e-9 is 0. So `--precision float16` needs a `GradScaler`, which multiplies the
loss by a large factor.

With FSDP, a policy (`mp_policy`) takes the place of autocast. It converts whole layers, LayerNorm
included:
    torchrun --standalone --nproc-per-node 2 \
        playground/transformer/mixed_precision.py --sharded --clip 1
    bfloat16: Linear, Tokens, LayerNorm, Attention, GELU, Block, LastToken
    float32: Transformer, parameters, gradients, optimizer state
    norm of the last gradients: 1.0000, of what rank 0 has: 0.7109

Try breaking it, in a copy beside it:
  1. Write `make_model(args).bfloat16()`. With `--lr 1e-5`, what changes in the losses and dtypes?
  2. In `Autocast`, return `logits` as they are. How many digits of the loss are left?
  3. Leave out `scaler.unscale_(optimizer)`. With `--precision float16 --clip 1`, is there an error?

Builds on: fully_sharded_data_parallel.py
The next lesson, `activation_checkpointing.py`, saves the memory of activations.
"""

import math
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, get_total_norm
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "full": None}  # None: as it is


class Autocast(torch.nn.Module):
    """A model that computes in 16 bits, and whose parameters keep their 32 bits."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model = model  # adds "model." to the names of its parameters
        self.dtype = dtype

    def forward(self, images):
        """Return logits of float32, so that the loss is computed in float32."""
        # NEW: in here, matrix products and attention convert their inputs and parameters to 16
        # bits. A block adds 16 bits to 32, which gives 32. Leave backward() outside: it computes
        # each gradient in the dtype of the forward pass.
        with torch.autocast(images.device.type, self.dtype):
            logits = self.model(images)
        return logits.float()


def shard(model, dtype, args):
    """Shard a model with FSDP. Its layers compute in 16 bits."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    wide = torch.float64 if args.double else torch.float32
    # NEW: FSDP converts the layer's inputs, and also the shards before it gathers them, which
    # halves the bytes. Gradients are computed in 16 bits, too, and added up in 32 bits.
    inside = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=inside)
    # NEW: the whole model returns float32, so the loss is computed in float32.
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=wide))


def make_step(model, optimizer, scaler, clip, loss):
    """Compute the gradients of a loss, clip them, and let the optimizer make a step."""
    optimizer.zero_grad()
    # NEW: multiply the loss, and with it all gradients, by a large factor. Only float16 needs this.
    # With other dtypes the scaler is disabled, and its methods change nothing.
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # NEW: divide the gradients again, because clipping needs their norm
    if clip:
        # NEW: if the norm of all gradients is larger than `clip`, scale them down. FSDP's are
        # DTensors, whose squares are added up over all ranks. So all ranks must call this.
        clip_grad_norm_(model.parameters(), clip)
    # NEW: if a gradient has become infinite, skip the step and halve the factor. All ranks do so
    # together: with DDP they have equal gradients, and with FSDP, unscale_() has told all ranks.
    scaler.step(optimizer)
    scaler.update()


def train(args):
    """Train in 16 bits, and show which dtype everything has."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    dtype = DTYPES[args.precision]
    if args.sharded:
        shard(model, dtype, args)
        parallel = model  # fully_shard has changed the model itself
    else:
        if dtype is not None:
            model = Autocast(model, dtype)
        parallel = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "float16")
    # NEW: fit_epoch() hands this to run_epoch() in place of the optimizer.
    step = partial(make_step, model, optimizer, scaler, args.clip)
    for epoch in range(args.epochs):
        fit_epoch(epoch, parallel, step, train_loader, test_loader, device, args)
    show_dtypes(model, optimizer, test_loader, device)
    show_norms(model)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del parallel
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def run_epoch(model, loader, device, step=None):
    """Train, or only test without step. Returns sums over all ranks: loss, correct, images."""
    model.train(step is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        with torch.set_grad_enabled(model.training):
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
        if step is not None:
            step(loss)  # NEW: make_step(), in place of backward() and the optimizer's step()
        sums[0] += loss.detach() * labels.numel()
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


# You can stop here: what follows only prints, and reads the flags.
def show_dtypes(model, optimizer, loader, device):
    """Print the dtype of what each kind of layer returns, and of what the optimizer has."""
    found = {}

    def note(layer, inputs, output):
        """PyTorch calls this after the forward pass of each layer."""
        name = type(layer).__name__.removeprefix("FSDP")  # which fully_shard puts in front
        found.setdefault(name, output.dtype)

    hooks = [layer.register_forward_hook(note) for layer in model.modules()]
    images, _ = next(iter(loader))
    with torch.no_grad():
        model(images.to(device))
    for hook in hooks:
        hook.remove()
    del found["Sequential"]  # returns what its last layer returns
    parameter = next(model.parameters())
    found["parameters"] = parameter.dtype
    found["gradients"] = parameter.grad.dtype
    found["optimizer state"] = optimizer.state[parameter]["exp_avg"].dtype
    if dist.get_rank() == 0:
        for dtype in sorted(set(found.values()), key=lambda each: each.itemsize):
            names = [name for name in found if found[name] == dtype]
            print(f"{str(dtype).removeprefix('torch.')}: {', '.join(names)}", flush=True)


def show_norms(model):
    """Print the norm of the last gradients, and the norm of what rank 0 has of them."""
    norm = clip_grad_norm_(model.parameters(), math.inf)  # changes no gradient
    gradients = [parameter.grad for parameter in model.parameters()]
    if isinstance(norm, DTensor):
        # The norm over all ranks. (With torch 2.9, to_local() has only this rank's part.)
        norm = norm.full_tensor()
        gradients = [gradient.to_local() for gradient in gradients]
    if dist.get_rank() == 0:
        own = get_total_norm(gradients)
        print(f"norm of the last gradients: {norm:.4f}, of what rank 0 has: {own:.4f}", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has. It trains the transformer by default."""
    parser.set_defaults(model="transformer")
    add = parser.add_argument
    add("--precision", choices=DTYPES, help="full: convert nothing; default: bfloat16")
    add("--sharded", action="store_true", help="FSDP with a policy, in place of DDP with autocast")
    add("--clip", type=flags.number, default=0.0, help="largest norm of the gradients; 0: any")


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks or each other."""
    parser.check_batch(args.batch_size, world_size)
    if args.double and args.precision in ("bfloat16", "float16"):
        parser.error(f"--double computes in float64: leave out --precision {args.precision}")
    if args.precision is None:
        args.precision = "full" if args.double else "bfloat16"


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), fit_epoch() and main(). If you copy this lesson, copy this, too.


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
