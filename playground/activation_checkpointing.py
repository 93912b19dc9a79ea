"""Activation checkpointing: keep only the input of a block, and compute the rest again.

backward() needs numbers from the forward pass, the activations. For each number of its input, a
block of the transformer keeps about 16: inputs and outputs of both LayerNorms (4), query, key,
value and what attention has read (4), and the MLP's hidden layer before and after GELU (4 + 4).
With activation checkpointing, a block is wrapped in PyTorch's checkpoint(), and keeps only its
input. When backward() reaches the block, checkpoint() runs its forward pass again. The 16 numbers
are then in memory until the block's gradients are complete, so only one block has them at a time.
The results do not change. backward() computes about twice as much as a forward pass, so a second
forward pass is about a third more computing. (In the table below, a step took 1.43 times as long.)

Which module should you wrap? One that keeps much more than its input, so not a single linear layer.
It should also be small compared to the model, because all activations of the module are in memory
during its backward pass. In a transformer, a block is such a module.

Dropout must drop the same numbers again. So checkpoint() keeps the state of the random number
generator, and restores it for the second forward pass (preserve_rng_state=True, the default).

PyTorch has two kinds of checkpoint(). The newer one, use_reentrant=False, is used here. The older
one does not train a module whose input needs no gradient. With it and DDP, some models end in
errors, because DDP does not see which parameters are used (playground/troubleshooting.md).

With --sharded, the lesson wraps a block first, and then shards it. FSDP gathers a layer anyway in
backward(), and the second forward pass uses these parameters. So no messages are added: the output
ends with "all_gather in forward: 4, in backward: 4, for 4 layers".

Run it, with one process or several:
    python playground/activation_checkpointing.py
    torchrun --standalone --nproc-per-node 2 playground/activation_checkpointing.py --sharded

It prints single_gpu.py's numbers for --model transformer. Before them, it measures a step of rank 0
with no block, every second block or every block wrapped. "passes" are forward passes of blocks. In
each row, 414,244 bytes are outside blocks. With 2 processes, --dataset digits --batch_size 120:
    blocks   bytes kept  predicted   passes  a step
    none     7,403,044   7,403,044   2       102 ms
    second   4,123,684   4,123,684   3       119 ms
    every    844,324     844,324     4       146 ms

Try breaking it, in a copy:
  1. Add `preserve_rng_state=False`, and use --dropout. Are the losses those of --checkpoint none?
  2. In build(), replace the last loop: `for block in chosen: block.mlp = Checkpointed(block.mlp)`.
     How many bytes are kept?
  3. Write `use_reentrant=True`, and give DDP `find_unused_parameters=True`. Is there an error?
  4. Import Tokens. Write `use_reentrant=True` and `isinstance(layer, (Block, Tokens))`. What is not
     trained?

Now write it yourself: checkpoint_block.py in playground/exercises/.

The next lesson, sequence_parallel.py, splits the attention heads and the tokens between ranks.
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import equal_batches, fetch, loaders
from common.guard_rails import check, explained
from common.models import Block, make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.activations import show_gathers, show_steps

WHICH = ("none", "second", "every")  # the blocks that are wrapped; second: every second one


class Checkpointed(torch.nn.Module):
    """A module that keeps only its input for backward(), and computes the rest again there."""

    def __init__(self, module):
        super().__init__()
        self.module = module  # adds "module." to the names of its parameters in the model

    def forward(self, inputs):
        """Return what the module returns."""
        # NEW: checkpoint() calls the module, and calls it again in backward(). Without autograd, as
        # in a test, it calls it once.
        return checkpoint(self.module, inputs, use_reentrant=False)


def wrap(stage, chosen):
    """Wrap some of the modules of an nn.Sequential, so that they keep only their input."""
    for position, module in enumerate(stage):
        if module in chosen:
            stage[position] = Checkpointed(module)


def build(args, which):
    """Return a transformer with some of its blocks wrapped, and their number."""
    model = make_model(args)
    blocks = [layer for layer in (*model.stage1, *model.stage2) if isinstance(layer, Block)]
    if args.dropout:
        for block in blocks:
            block.mlp.append(torch.nn.Dropout(0.1))  # the other lessons have none
    chosen = {"none": [], "second": blocks[::2], "every": blocks}[which]
    for stage in (model.stage1, model.stage2):
        wrap(stage, chosen)
    return model, len(chosen)


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
    """Train, or only test if there is no optimizer. Returns sums over the images of all ranks."""
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
            loss.backward()  # NEW: computes the forward pass of each wrapped block again
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Show what a step keeps. Then train and test, and print one line for each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    test_loader = equal_batches(test_loader.dataset, rank, world_size)  # as FSDP needs it
    images, labels = next(iter(train_loader))
    # Three models, which are only measured.
    ways = {which: build(args, which) for which in WHICH}
    show_steps(args, ways, images.to(device), labels.to(device))
    del ways
    torch.manual_seed(args.seed)  # the models above have drawn numbers
    model, _ = build(args, args.checkpoint)
    model.to(device)
    # NEW: the blocks are wrapped already, and nothing else changes for DDP or FSDP.
    if args.sharded:
        mesh = dist.init_device_mesh(device.type, mesh_shape=(world_size,))
        mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
        for module in (*model.stage1, *model.stage2, model):
            fully_shard(module, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)  # each rank drops different neurons
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    if args.sharded:
        show_gathers(model, images.to(device), labels.to(device))
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, fetch the data, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    parser.set_defaults(model="transformer")
    add = parser.add_argument
    add("--checkpoint", choices=WHICH, default="every", help="which blocks keep only their input")
    add("--sharded", action="store_true", help="FSDP in place of DDP")
    add("--dropout", action="store_true", help="drop a tenth of what each MLP returns")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    if args.model != "transformer":
        parser.error(f"--model {args.model} has no blocks: use --model transformer")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
