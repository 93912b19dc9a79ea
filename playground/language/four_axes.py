r"""Four axes: pipeline, FSDP, context and tensor parallelism of a language model, on one mesh.

Run it on a mesh of 2 x 2 x 1 x 2 ranks, along the axes pp (pipeline), dp (FSDP), cp (context) and
tp (tensor parallelism). The second command has context parallelism in place of FSDP and tensor
parallelism. On two cores, the first one takes about three minutes:
    torchrun --standalone --nproc-per-node 8 playground/language/four_axes.py
    torchrun --standalone --nproc-per-node 4 \
        playground/language/four_axes.py --mesh 2x1x2x1

It prints the same numbers as `single_gpu.py --model language`, up to rounding; with `--double` all
twelve digits agree. First it prints what each rank keeps:
    rank 0  pp 0  dp 0  cp 0  tp 0  keeps 15,680 parameters
    rank 1  pp 0  dp 0  cp 0  tp 1  keeps 15,680 parameters

It is the sum of four lessons, which it imports, so a copy needs these in their folders beside it.
Ranks that differ along pp have different layers; along dp, different rows of the text; along cp,
different tokens of the same rows; along tp, different heads, columns of the MLP and words of the
vocabulary (`playground/pages/figures/parts.svg`). `wrap` gives a rank its part, axis by axis, in an
order that larger programs have, too. FSDP shards over dp and cp as if they were one axis, because
ranks along both have the same parameters, but different tokens. This is where gradients are summed:

    gradient of                   over pp             over dp and cp   over tp
    a split layer                 no, in one stage    by FSDP          no, a rank has its own shard
    an RMSNorm between pairs      no, in one stage    by FSDP          no, all ranks have the same
      if tp splits the tokens     no                  by FSDP          summed: each has some tokens

Two more sums are of activations' gradients. Over cp, the ring adds up those of keys and values.
Over tp, `backward()` adds up the gradient of an RMSNorm's output, which all ranks have used. So all
compute the same gradient of its weight.

On the ranks of a tp group, shards have the same name, so `torch.distributed.checkpoint` would take
them for replicas of one tensor. Therefore `state_dict()` raises an error. To save them, write a
folder for each index along tp: make a group of the ranks that have this index, and pass it to
`dcp.save(dict(model.named_parameters()), ...)` as `process_group`. To clip gradients, also add up
over the axes: `playground/pages/sharding.md` has the lines.

Try breaking it, in a copy beside it, with `--double`, and compare the losses:
  1. With `--mesh 1x1x2x1`, train with `self.own(rows).roll(-1, dims=1)` in place of `own(labels)`,
     as if each rank had shifted its own tokens. Is there an error?
  2. With the same mesh, set `positions` of each attention to None after `split_tokens()`.
  3. With `--mesh 1x2x1x1`, leave out `* self.ranks` in `loss()`. Why does the loss hardly change?
  4. With `--mesh 1x2x1x2`, call `shard()` before `split_layers()`. Is there an error?
Now repair `masked_tokens.py` in `playground/museum/`.
Builds on: vocabulary_parallel.py
The next lesson, `thousand_ranks.py`, tries a plan for 1,024 ranks in a single process.
"""

import math
import os
import re
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
for folder in ("split", "transformer"):  # NEW: and the four lessons
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))
from context_parallel import ring_attention, split_tokens, zigzag
from head_parallel import SplitBlock, all_reduce, nothing
from pipeline_parallel import cut as cut_stages
from pipeline_parallel import same_size_loaders
from vocabulary_parallel import SplitCrossEntropy, SplitEmbedding, SplitOutput

from common import flags
from common.data import ROW, fetch
from common.models import make_layers
from common.transformer import Block


def make_meshes(text, device, timeout):
    """Return a mesh with the axes of --mesh, and one of the same ranks whose dp and cp are one."""
    pp_size, dp_size, cp_size, tp_size = map(int, text.split("x"))
    # NEW: ranks that differ along the last axis only are neighbours. This is tp, because every
    # layer waits for its messages.
    sizes = (pp_size, dp_size, cp_size, tp_size)
    mesh = dist.init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp", "cp", "tp"))
    # NEW: fully_shard takes two axes for HSDP, so the same ranks get a second mesh, in which dp and
    # cp are one. With --mesh 1x2x2x2, rank 5 is dp 1, cp 0, tp 1 above, and dp_cp 2, tp 1 here.
    sizes = (pp_size, dp_size * cp_size, tp_size)
    flat = dist.init_device_mesh(device.type, sizes, mesh_dim_names=("pp", "dp_cp", "tp"))
    for group in (*mesh.get_all_groups(), *flat.get_all_groups()):
        # The groups of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
        group.set_timeout(timeout)
    return mesh, flat


def split_layers(stage, group):
    """Tensor parallelism: give each rank of a tp group its shard of every layer of a stage."""
    for index, layer in enumerate(stage):
        if isinstance(layer, torch.nn.Embedding):
            stage[index] = SplitEmbedding(layer, group)
        elif isinstance(layer, Block):
            stage[index] = SplitBlock(layer, (nothing, all_reduce), (all_reduce, nothing), group)
        else:  # the end of the model: an RMSNorm, which stays whole, and the output layer
            layer.output = SplitOutput(layer.output, group)


def shard(stage, mesh):
    """FSDP: shard each block of a stage, and then its other layers, over a mesh of one axis."""
    # (A wrapper of activation checkpointing has the block inside.)
    blocks = [x for x in stage if any(isinstance(part, SplitBlock) for part in x.modules())]
    for module in (*blocks, stage):
        # NEW: all micro-batches of a step use the same parameters, so a rank keeps what it has
        # gathered for the first one until the last backward(). Gradients also stay whole until
        # then. A reduce_scatter for each module adds them up, and leaves a shard on each rank.
        fully_shard(module, mesh=mesh, reshard_after_forward=False)


def wrap(layers, mesh, flat, device, args):
    """Return what this rank computes: its stage of the model, split and sharded."""
    if layers[0].weight is layers[-1].output.weight:
        # Megatron-LM keeps it in the first and last stage, and adds up the gradients of both.
        raise ValueError("a table that two layers share would become two parameters here")
    # NEW: 1. The pipeline, so that a rank splits and shards the layers of its own stage only.
    stage = cut_stages(layers, mesh["pp"].size())[mesh.get_local_rank("pp")]
    # NEW: 2. Tensor parallelism. It cuts whole parameters, so it must come before fully_shard.
    split_layers(stage, mesh.get_group("tp"))
    # NEW: 3. Context parallelism. It replaces the forward() of attention, which now has the heads
    # of this rank only, and so sends the keys and values of these. Each rank rotates queries and
    # keys by the true positions of its tokens, and not by 0, 1, 2 and so on.
    positions = zigzag(ROW, mesh["cp"].size())
    mine = positions[mesh.get_local_rank("cp")]
    attend = partial(ring_attention, positions=positions, group=mesh.get_group("cp"))
    split_tokens(stage, attend, mine)
    # 4. and 5. Here, activation checkpointing and then torch.compile would wrap each block. They
    # need its final forward(), with all messages in it.
    # NEW: 6. FSDP, after all changes of a block's forward(), because its hooks gather the
    # parameters before that forward() runs.
    shard(stage, flat["dp_cp"])
    # NEW: 7. The schedule, which calls the whole stage, and lets FSDP send gradients only after the
    # last micro-batch. (The optimizer comes later still, because fully_shard replaces parameters.)
    return Pipeline(stage, mine, mesh, device, args)


class Pipeline(torch.nn.Module):
    """The stage of this rank, and the schedule that runs it together with other ranks' stages.

    `mine` has the positions of this rank's tokens in a row of the text, int64 (own tokens,).
    """

    def __init__(self, stage, mine, mesh, device, args):
        super().__init__()
        self.stage = stage
        self.mine = mine
        self.mesh = mesh
        self.ranks = mesh["dp"].size() * mesh["cp"].size()
        number = mesh.get_local_rank("pp")
        count = mesh["pp"].size()
        self.is_first = number == 0
        self.is_last = number == count - 1
        connected = PipelineStage(stage, number, count, device, group=mesh.get_group("pp"))
        self.schedule = Schedule1F1B(connected, args.micro_batches, self.loss, scale_grads=False)

    def own(self, rows):
        """Return this rank's part of rows or labels, (N, 128): some rows (dp), some tokens (cp)."""
        # NEW: common/data.py has shifted the labels already: each is the next byte of the text.
        # Here it would be too late, because the byte after a chunk of tokens is on another rank.
        own_rows = rows[self.mesh.get_local_rank("dp") :: self.mesh["dp"].size()]
        return own_rows[:, self.mine]

    def loss(self, scores, labels):
        """Return what this rank's tokens of a micro-batch add to the loss of a global batch.

        Ranks of a tp group have the same loss, and each passes on the gradient of its own scores.
        """
        losses, _ = SplitCrossEntropy.apply(scores, labels, self.mesh.get_group("tp"))
        # NEW: the sum of the losses, divided by the number of all tokens. So gradients are plain
        # sums, over micro-batches and over the ranks along dp and cp. But fully_shard divides by
        # the number of these ranks, so this multiplies by it. And the schedule would divide by the
        # number of micro-batches, if it had no scale_grads=False.
        return losses.sum() / self.tokens * self.ranks

    def forward(self, rows, labels):
        """Compute a global batch, and in training its gradients, too.

        All ranks pass the whole batch. Only the last stage returns scores, of this rank's words,
        rows and tokens.
        """
        self.tokens = (labels != -100).sum()  # that count, of the global batch
        inputs = [self.own(rows)] if self.is_first else []
        if self.training:
            return self.schedule.step(*inputs, target=self.own(labels))
        return self.schedule.eval(*inputs, target=self.own(labels))


def train(args):
    """Make a mesh of four axes, train a language model on it, and show what each rank keeps."""
    rank, device = join(args)
    mesh, flat = make_meshes(args.mesh, device, timedelta(seconds=args.timeout))
    train_loader, test_loader = same_size_loaders(args)  # all ranks read the same batches
    # The same seed on all ranks, because each keeps a part of the same random parameters.
    torch.manual_seed(args.seed)
    layers = make_layers(args)
    model = wrap(layers, mesh, flat, device, args)
    show_mesh(model, mesh)
    # Dropout, if there is any, must be equal along tp only. With two ranks along tp, the ranks 0
    # and 1 are a group, 2 and 3 are the next one, and so on, and each group gets a seed.
    torch.manual_seed(args.seed + rank // mesh["tp"].size())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    dist.barrier()  # DTensor keeps the groups, and without this Python may abort at exit
    dist.destroy_process_group()


def run_epoch(model, loader, device, optimizer=None):
    """Train, or with no optimizer, test.

    Returns three sums: the loss, the number of tokens predicted correctly, the number of tokens.
    All ranks of a tp group count the same tokens, which changes neither mean nor percentages.
    """
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for rows, labels in loader:
        rows = rows.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if optimizer is not None:
            optimizer.zero_grad()
        with torch.set_grad_enabled(model.training):
            scores = model(rows, labels)  # in training, this computes the gradients, too
        if optimizer is not None:
            optimizer.step()
        if scores is not None:
            own_labels = model.own(labels)
            tp_group = model.mesh.get_group("tp")
            losses, correct = SplitCrossEntropy.apply(scores.detach(), own_labels, tp_group)
            sums[0] += losses.sum()
            sums[1] += correct.sum()
            sums[2] += (own_labels >= 0).sum()  # without the rows that fill up the last batch
    dist.all_reduce(sums)
    return sums.tolist()


# You can stop here: what follows prints the mesh, and checks the flags.


def show_mesh(model, mesh):
    """Print the coordinates of each rank in the mesh, and the number of parameters it keeps."""
    axes = zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True)
    coordinates = "  ".join(f"{name} {index}" for name, index in axes)
    kept = sum(parameter.to_local().numel() for parameter in model.parameters())
    row = f"rank {dist.get_rank()}  {coordinates}  keeps {kept:,} parameters"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.set_defaults(model="language")
    add = parser.add_argument
    add("--mesh", help="ranks along pp, dp, cp and tp, as in 2x2x1x2, the default of 8 ranks")
    add("--micro_batches", type=flags.positive, default=4, help="of a dp rank's part of a batch")


def check_flags(parser, args, world_size):
    """Choose a mesh if none is given, and refuse what its ranks cannot split."""
    if args.model != "language":
        parser.error(f"--model {args.model} has no vocabulary: use --model language")
    if torch.__version__.startswith("2.9."):  # see pipeline_parallel.py
        parser.error("torch 2.9 cannot run this lesson: use a newer version")
    if args.mesh is None:
        pp_size = 2 if world_size % 2 == 0 else 1
        tp_size = 2 if world_size % 4 == 0 else 1
        cp_size = 2 if world_size % 16 == 0 else 1
        dp_size = world_size // (pp_size * cp_size * tp_size)
        args.mesh = f"{pp_size}x{dp_size}x{cp_size}x{tp_size}"
    sizes = [int(size) for size in re.findall(r"\d+", args.mesh)]
    if not re.fullmatch(r"(\d+x){3}\d+", args.mesh) or math.prod(sizes) != world_size:
        wrong = f"--mesh {args.mesh} does not have 4 axes and {world_size} processes"
        parser.error(f"{wrong}: use --mesh 1x{world_size}x1x1, or leave it out")
    pp_size, dp_size, cp_size, tp_size = sizes
    layers = args.layers + 2  # the blocks, the embedding, and the end of the model
    if pp_size > layers:
        parser.error(f"{pp_size} stages, but only {layers} layers: use a larger --layers")
    if args.micro_batches < pp_size:
        wrong = f"--micro_batches {args.micro_batches}: 1F1B needs one for each stage"
        parser.error(f"{wrong}: use --micro_batches {pp_size}")
    parts = dp_size * args.micro_batches
    if args.batch_size % parts:
        near = max(1, round(args.batch_size / parts)) * parts
        wrong = f"{dp_size} ranks along dp with {args.micro_batches} micro-batches each"
        parser.error(f"{wrong} cannot divide --batch_size {args.batch_size}: use {near}")
    if ROW % (2 * cp_size):  # zigzag
        parser.error(f"{cp_size} ranks along cp cannot split {ROW} tokens: use 2, 4 or 8")
    if 256 % tp_size:  # the vocabulary has a token for each byte
        parser.error(f"{tp_size} ranks along tp cannot split 256 tokens: use 2, 4 or 8")
    unit = 2 * tp_size  # two heads share their keys and values
    if args.heads % unit:
        near = max(1, round(args.heads / unit)) * unit
        parser.error(f"{tp_size} ranks along tp cannot split --heads {args.heads}: use {near}")


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
