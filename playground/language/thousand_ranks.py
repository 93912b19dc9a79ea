"""One rank of a thousand, without the others: a dry run of a large plan, on a laptop.

Run it as rank 0 of a mesh of 128 x 8 ranks, and as the last of 1,024 ranks that only shard:
    python playground/language/thousand_ranks.py
    python playground/language/thousand_ranks.py --mesh 1024x1 --rank 1023 --checkpoint

One process makes one step of a model of 6.3 billion parameters. It prints the bytes that this rank
holds, keeps for `backward()`, and gives to collectives. The last column is what a ring sends:
    rank 0 of 1,024, mesh 128x8, 6,302,208,000 parameters
    holds      24.6 MB of parameters
    holds      24.6 MB of gradients
    holds      49.3 MB of optimizer state
    keeps   4,601.8 MB for backward()
    call            axis  times   MB given  MB by a ring
    all_gather      dp       67       24.4       3,097.2
    reduce_scatter  dp       34    3,155.2       3,130.5
    all_gather      tp      130      545.3       3,816.8
    reduce_scatter  tp      130    4,362.1       3,816.8
Along dp, 33 layers are gathered twice, and the embedding once. Along tp, a block gathers and
scatters its tokens four times, and the ends of the model twice. A last line has small all_reduces.
Rank 1,023 of the second command holds less than others: the first 1,000 ranks get 32 of the 32,000
words each, and the last 24 ranks get none.

Which mesh should train your model on 1,024 GPUs? Before you rent them, a dry run finds what does
not divide, much of what does not fit, and what is sent. `parallelize_module`, `fully_shard`,
`backward()` and Adam are PyTorch's own, and run as they would there, with three replacements:
- There are no other ranks. With the backend "fake", each call returns at once.
- On the meta device, the model is made and sharded without memory.
- In FakeTensorMode, a tensor has a shape, a dtype and a device, but no memory. An operation finds
  out the shape of its result, and computes nothing.

So bytes are counted, and seconds are not. (With a small model, four real ranks counted the same.)
Memory that is needed only for a moment is not counted either: gathered layers, whole gradients,
copies of scores; nor is the embedding, which stays gathered until `backward()`. And on a GPU, some
operations keep different tensors than on a CPU.

Try breaking it, in a copy beside it:
  1. Run it with `--mesh 32x32`, a plan that does not work. Where does it stop, and why?
  2. Add `reshard_after_forward=False` to `fully_shard(layer, ...)`. Which two lines change?
  3. Leave RMSNorm in place of LayerNorm. How many bytes does a CPU keep?
  4. Before `loss.backward()`, let rank 0 alone call `dist.barrier()`. Does it hang?

Builds on: fully_sharded_data_parallel.py
The next lesson, `trainer_and_generator.py`, rewards what a model writes.
"""

import sys
from collections import Counter
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

# NEW: torch 2.9 needs this to know what a call returns for fake tensors. It has no public name, and
# neither has FakeTensorMode (in torch 2.9 to 2.15).
import torch.distributed._tools.fake_collectives  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.models import Language
from common.transformer import Block


def talk(args):
    """Make a step as one of many ranks, with no other there, and print what this rank counts."""
    # NEW: this process is the only one. With this backend, a call sends nothing and returns at
    # once, and what it should have received is arbitrary.
    dist.init_process_group("fake", rank=args.rank, world_size=args.dp * args.tp)
    mesh = dist.init_device_mesh(args.device, (args.dp, args.tp), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):  # as in fully_sharded_data_parallel.py --meta
        model = make_large(args)
    wrap(model, mesh, args)
    # NEW: here, tensors are fake. Of the model's meta tensors, to_empty() makes fake ones.
    with FakeTensorMode(allow_non_fake_inputs=True):
        held, kept, calls = run_step(model, mesh, args)
    show(model, held, kept, calls, mesh, args)
    dist.destroy_process_group()


def wrap(model, mesh, args):
    """Split each layer along tp, and shard what a rank has of it along dp."""
    if args.tp > 1:
        split(model, mesh["tp"])
    if args.checkpoint:
        for stage in (model.stage1, model.stage2):
            for position, layer in enumerate(stage):
                if isinstance(layer, Block):
                    stage[position] = Checkpointed(layer)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers[1:]:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)  # the rest, which is the embedding


def split(model, mesh):
    """Split the layers of each block and the tokens between them, and split the vocabulary.

    This is what sequence_parallel.py and vocabulary_parallel.py do with --by dtensor.
    """
    whole = Replicate()
    own = Shard(1)  # between the pairs, each rank has some of the tokens
    begin = PrepareModuleInput(input_layouts=own, desired_input_layouts=whole)
    norm = SequenceParallel()
    row = RowwiseParallel(output_layouts=own)
    of_block = {"norm1": norm, "attention": begin, "norm2": norm, "mlp": begin}
    of_block |= {"attention.output": row, "mlp.down": row}
    for column in ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up"):
        of_block[column] = ColwiseParallel()
    for block in model.layers[1:-1]:
        parallelize_module(block, mesh, of_block)
    end = f"stage2.{len(model.stage2) - 1}"
    of_ends = {
        "stage1.0": RowwiseParallel(input_layouts=whole, output_layouts=own),
        f"{end}.norm": norm,
        f"{end}.output": ColwiseParallel(input_layouts=own, use_local_output=False),
    }
    parallelize_module(model, mesh, of_ends)


def run_step(model, mesh, args):
    """Make a step. Returns the bytes that are held, by name, those kept for backward(), and Calls.

    Nothing here is special: with real ranks, and without FakeTensorMode, it makes a real step.
    """
    model.to_empty(device=args.device)  # would give the shards memory
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    rows = torch.zeros(args.rows, args.sequence, dtype=torch.int64, device=args.device)
    storages = set()  # what shares memory counts once

    def keep(tensor):
        """Note the memory behind a tensor that autograd keeps."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages.add(local.untyped_storage())
        return tensor

    with Calls(mesh) as calls, loss_parallel():
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            scores = model(rows)
            loss = F.cross_entropy(scores.float(), rows)
        # Memory that FSDP has freed, that of gathered layers, has 0 bytes now.
        kept = sum(storage.nbytes() for storage in storages)
        loss.backward()
    optimizer.step()
    parameters = list(model.parameters())
    averages = []  # Adam's
    for state in optimizer.state.values():
        averages += [state["exp_avg"], state["exp_avg_sq"]]
    held = {
        "parameters": sum(each.to_local().nbytes for each in parameters),
        "gradients": sum(each.grad.to_local().nbytes for each in parameters),
        "optimizer state": sum(each.to_local().nbytes for each in averages),
    }
    return held, kept, calls


def make_large(args):
    """Return the language model of this course in the size that the flags say."""
    model = Language(args.width, args.layers, args.heads)
    end = model.stage2[-1]
    # NEW: the tokens are words of a large vocabulary, in place of 256 bytes.
    model.stage1[0] = torch.nn.Embedding(args.words, args.width)
    end.output = torch.nn.Linear(args.width, args.words, bias=False)
    # NEW: on a CPU, RMSNorm keeps two tensors in float32 for backward(). On a GPU, it is a single
    # kernel, which keeps its input, as LayerNorm does here.
    for block in model.layers[1:-1]:
        block.norm1 = torch.nn.LayerNorm(args.width, bias=False)
        block.norm2 = torch.nn.LayerNorm(args.width, bias=False)
    end.norm = torch.nn.LayerNorm(args.width, bias=False)
    return model


# You can stop here: what follows counts calls, prints, and checks the flags.

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


class Calls(TorchDispatchMode):
    """Inside `with Calls(mesh) as calls:`, the calls of this rank that send something are counted.

    Attributes:
        times: how many there were, by kind and axis of the mesh: times["all_gather", "dp"].
        given: the bytes of the tensors that this rank has given to them, by the same.
    """

    def __init__(self, mesh):
        super().__init__()
        self.axes = {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names}
        self.times = Counter()
        self.given = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        """PyTorch calls this in place of each of its operations."""
        if DTensor in types:
            return NotImplemented  # PyTorch then calls operations on shards, which also come here
        # NEW: what sends something is an operation, too. It is c10d::_allgather_base_ for FSDP, and
        # _c10d_functional::all_gather_into_tensor for a DTensor.
        name = operation.name().replace("_", "")
        for kind in KINDS:
            if "c10d" in name and kind.replace("_", "") in name:
                self.note(kind, args)
        return operation(*args, **(kwargs or {}))

    def note(self, kind, args):
        """Note a call. `args` has one or two tensors, and FSDP's group or the name of DTensor's."""
        sizes = [each.nbytes for each in args if isinstance(each, torch.Tensor)]
        objects = [each for each in args if isinstance(each, torch.ScriptObject)]
        name = dist.ProcessGroup.unbox(objects[0]).group_name if objects else args[-1]
        axis = self.axes[name]
        self.times[kind, axis] += 1
        # Of two tensors, one is given and one receives. all_gather makes a larger one, and
        # reduce_scatter a smaller one.
        self.given[kind, axis] += min(sizes) if kind == "all_gather" else max(sizes)


def show(model, held, kept, calls, mesh, args):
    """Print what this rank holds and keeps, and what it gives to the calls of a step."""
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {args.rank:,} of {mesh.size():,}, mesh {args.mesh}, {count:,} parameters")
    for name, nbytes in held.items():
        print(f"holds {nbytes / 1e6:>9,.1f} MB of {name}")
    print(f"keeps {kept / 1e6:>9,.1f} MB for backward()")
    print("call            axis  times   MB given  MB by a ring")
    for axis, kind in product(("dp", "tp"), KINDS):
        times = calls.times[kind, axis]
        if times:
            given = calls.given[kind, axis]
            sent = by_ring(kind, given, mesh[axis].size())
            print(f"{kind:<15} {axis:<5} {times:>5} {given / 1e6:>10,.1f} {sent / 1e6:>13,.1f}")


def by_ring(kind, given, ranks):
    """Return how many bytes a rank sends if so many ranks form a ring, as in collectives.py."""
    if kind == "all_gather":
        return given * (ranks - 1)
    if kind == "reduce_scatter":
        return given * (ranks - 1) / ranks
    return 2 * given * (ranks - 1) / ranks


def add_flags(parser):
    """Add the flags of this lesson, which reads no data."""
    # For the parser, which refuses heads that do not divide the width.
    parser.set_defaults(model="language", dataset="text", tokens=None)
    add = parser.add_argument
    add("--mesh", default="128x8", help="ranks along dp (FSDP) and tp; default: 128x8")
    add("--device", type=flags.device, default="cpu", help="whose kernels count; GPUs: not tried")
    add("--rank", type=int, default=0, help="the rank that this process plays")
    add("--checkpoint", action="store_true", help="blocks keep only their input for backward()")
    add("--rows", type=flags.positive, default=1, help="rows of text in a step of a tp group")
    add("--sequence", type=flags.positive, default=4096, help="tokens of a row; default: 4096")
    add("--layers", type=flags.positive, default=32, help="blocks; default: 32")
    add("--width", type=flags.positive, default=4096, help="hidden size; default: 4096")
    add("--heads", type=flags.positive, default=32, help="attention heads; default: 32")
    add("--words", type=flags.positive, default=32000, help="of the vocabulary; default: 32000")


def check_flags(parser, args):
    """Read the mesh, and refuse a rank that it has not, and tokens that it cannot divide."""
    sizes = args.mesh.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
        parser.error(f"--mesh {args.mesh} must be two numbers, 1 or more, as in 128x8")
    args.dp, args.tp = map(int, sizes)
    if not 0 <= args.rank < args.dp * args.tp:
        parser.error(f"--rank {args.rank}: the ranks are 0 to {args.dp * args.tp - 1}")
    if args.sequence % args.tp:
        parser.error(f"--sequence {args.sequence}: {args.tp} ranks along tp cannot divide it")


def main():
    """Read the flags, and play one of the ranks."""
    parser = flags.Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    check_flags(parser, args)
    talk(args)


# ---------- Unchanged from language_model.py ----------
# You know what follows: Checkpointed(). If you copy this lesson, copy this, too.


class Checkpointed(torch.nn.Module):
    """A block that keeps only its input for backward(), and computes the rest again there.

    A block with batch norm would update its running averages twice in each step.
    """

    def __init__(self, block):
        super().__init__()
        self.block = block  # adds "block." to names: resume with --checkpoint as it was before

    def forward(self, tokens):
        """Return what the block returns."""
        return checkpoint(self.block, tokens, use_reentrant=False)


if __name__ == "__main__":
    main()
