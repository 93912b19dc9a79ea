r"""Activation checkpointing: keep only the input of a block, and compute the rest again.

Run it with DDP, or with FSDP:
    torchrun --standalone --nproc-per-node 2 playground/transformer/activation_checkpointing.py
    torchrun --standalone --nproc-per-node 2 \
        playground/transformer/activation_checkpointing.py --sharded

Both print the same numbers as `single_gpu.py --model transformer`, up to rounding; with `--double`
all twelve digits agree. Before they train, they show what rank 0 keeps in a step if no block is
checkpointed ("wrapped"), every second one or every one:
    wrapped: none    7,896,580 bytes kept, 2 forward passes of blocks
    wrapped: second  4,398,596 bytes kept, 3 forward passes of blocks
    wrapped: every     900,612 bytes kept, 4 forward passes of blocks

`backward()` needs numbers from the forward pass, the activations. For each number of its input, a
block of the transformer keeps about 16: inputs and outputs of both LayerNorms (4), query, key,
value and what attention has read (4), and the MLP's hidden layer before and after GELU (4 + 4).
(Of the bytes above, 441,860 are kept outside the blocks.)

A wrapped block keeps only its input. When `backward()` reaches the block, its forward pass runs
again, and only this block has the 16 numbers in memory. The price is a second forward pass. Because
`backward()` computes twice as much as a forward pass, this is about a third more. (Measured on one
core: 1.4 times.) With FSDP it adds no messages, because `backward()` gathers each layer anyway.
Selective checkpointing keeps what is dear to compute, such as the outputs of products of matrices
(`addmm`), attention and messages, and computes only the rest again. Then `checkpoint()` gets
    context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

Try breaking it, in a copy beside it:
  1. Add `preserve_rng_state=False` and `--dropout`. Are the losses those of `--checkpoint none`?
  2. In `build`, replace the last loop: `for block in chosen: block.mlp = Checkpointed(block.mlp)`.
     How many bytes are kept?
  3. Write `use_reentrant=True`, and give DDP `find_unused_parameters=True`. Is there an error?
  4. Import Tokens. Write `use_reentrant=True` and `isinstance(layer, (Block, Tokens))`. What is not
     trained?
Builds on: fully_sharded_data_parallel.py
The next lesson, `head_parallel.py`, splits the attention heads between ranks.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model
from common.transformer import Block

WHICH = ("none", "second", "every")  # the blocks that are wrapped; second: every second one


class Checkpointed(torch.nn.Module):
    """A module that keeps only its input for backward(), and computes the rest again there."""

    def __init__(self, module):
        super().__init__()
        if any(getattr(each, "running_mean", None) is not None for each in module.modules()):
            raise ValueError("batch norm would update its running averages twice in each step")
        self.module = module  # adds "module." to names, unlike PyTorch's checkpoint_wrapper()

    def forward(self, inputs):
        """Return what the module returns."""
        # NEW: checkpoint() calls the module, and keeps none of the activations inside. When
        # backward() needs them, it calls the module again, with the same random numbers, so dropout
        # drops the same neurons.
        return checkpoint(self.module, inputs, use_reentrant=False)


def build(args, which):
    """Return a transformer with none of its blocks wrapped, every second one, or every one."""
    model = make_model(args)
    blocks = [layer for layer in model.layers if isinstance(layer, Block)]
    if args.dropout:
        for block in blocks:
            dropout = torch.nn.Dropout(0.1)  # the model itself has none
            block.mlp = torch.nn.Sequential(block.mlp, dropout)
    chosen = {"none": [], "second": blocks[::2], "every": blocks}[which]
    for stage in (model.stage1, model.stage2):
        for position, layer in enumerate(stage):
            if layer in chosen:
                # NEW: wrap modules that keep much more than their input. (A linear layer keeps
                # nothing else.) Wrap each block, and not the whole model, because backward() has
                # all activations of a wrapped module in memory at once.
                stage[position] = Checkpointed(layer)
    return model


def train(args):
    """Show what a step keeps for backward(), and train."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    if rank == 0:
        show_steps(args, train_loader, device)
    torch.manual_seed(args.seed)
    model = build(args, args.checkpoint).to(device)
    if args.sharded:
        shard(model, args)  # NEW: wrap the blocks first, then shard the model
    else:
        model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def shard(model, args):
    """Shard each layer with FSDP, and then the whole model."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


# You can stop here: what follows only counts, and reads the flags.
def show_steps(args, train_loader, device):
    """Print what a step keeps if none of the blocks is wrapped, every second one, or every one."""
    images, labels = next(iter(train_loader))
    for which in WHICH:
        model = build(args, which).to(device)
        nbytes, passes = run_step(model, images.to(device), labels.to(device))
        kept = f"{nbytes:>9,} bytes kept, {passes} forward passes of blocks"
        print(f"wrapped: {which:<8}{kept}", flush=True)


def run_step(model, images, labels):
    """Compute gradients. Returns the bytes kept for them, and how many times a block computed."""
    kept = {}  # for each address in memory, the bytes there: what shares memory counts once
    passes = []  # an entry for each forward pass of a block

    def keep(tensor):
        """Note a tensor that autograd keeps."""
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the same memory

    def note_pass(block, inputs):
        """Note a forward pass of a block."""
        passes.append(block)

    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(note_pass)
    # Autograd keeps what keep() returns. The second function returns it to backward().
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    for parameter in model.parameters():
        kept.pop(parameter.data_ptr(), None)  # they are in memory anyway
    return sum(kept.values()), len(passes)


def add_flags(parser):
    """Add the flags that only this lesson has. It trains the transformer by default."""
    parser.set_defaults(model="transformer")
    add = parser.add_argument
    add("--checkpoint", choices=WHICH, default="every", help="which blocks keep only their input")
    add("--sharded", action="store_true", help="FSDP in place of DDP")
    add("--dropout", action="store_true", help="drop a tenth of what each MLP returns")


def check_flags(parser, args, world_size):
    """Refuse a batch that the ranks cannot divide, and a model without blocks."""
    parser.check_batch(args.batch_size, world_size)
    if args.model in ("mlp", "cnn"):
        parser.error(f"--model {args.model} has no blocks: use --model transformer")


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), fit_epoch(), run_epoch() and main(). If you copy this lesson, copy
# this, too.


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
