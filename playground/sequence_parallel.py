"""Tensor and sequence parallelism: the ranks split the heads of a transformer, and then its tokens.

A head of attention uses its own columns of query, key and value, and no others. So each rank can
compute some of the heads. The query, key and value layers are split by columns and the output layer
by rows: a pair, as in tensor_parallel.py. The two layers of the MLP are another pair. So a block
needs two all_reduces in forward() and two in backward().

A pair begins with COPY, which sends nothing in forward(), and ends with ADD, an all_reduce. Then a
block adds its input, and LayerNorm follows. Each rank computes this for all tokens, and keeps the
inputs for backward(). With --sequence, it does so for its own tokens only. SCATTER, a
reduce_scatter, then replaces ADD, and GATHER, an all_gather, replaces COPY. They are the two halves
of an all_reduce, so the pairs send the same bytes (https://arxiv.org/abs/2205.05198). An example:
two ranks, four tokens of one number each, and what ADD or the other three make of the terms.

    terms of the ranks       ADD          or    SCATTER    LayerNorm    GATHER
    rank 0: [ 1  2  3  4]    [11 22 33 44]      [11 22]    [a b]        [a b c d]
    rank 1: [10 20 30 40]    [11 22 33 44]      [33 44]    [c d]        [a b c d]

In backward(), GATHER is a reduce_scatter, because each rank has used all tokens. SCATTER is an
all_gather. A block's LayerNorms, the biases after the pairs and the embedding get gradients from a
rank's own tokens only. So each rank has a part of these gradients, and an all_reduce adds up the
parts. Let [1 2 3 4] be the gradients of four tokens to which a bias was added. Rank 0 has 1 + 2,
rank 1 has 3 + 4, and the sum is 10. All ranks have the same images, so nothing is divided by n.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/sequence_parallel.py
    torchrun --standalone --nproc-per-node 2 playground/sequence_parallel.py --sequence
    torchrun --standalone --nproc-per-node 2 playground/sequence_parallel.py --by dtensor --sequence

It prints single_gpu.py's numbers for --model transformer. It then counts a step, with --sequence
(playground/sharding.md has the formulas of the predictions):
    axis  collective      counted  predicted  bytes sent    predicted
    tp    all_gather      9        9          2,064,384     2,064,384
    tp    reduce_scatter  8        8          1,835,008     1,835,008
    tp    all_reduce      15       15         8,832         8,832
    kept for backward(): 9,255,940 bytes
The ninth all_gather follows the last block, and the all_reduces add up parts of gradients. Without
--sequence, 8 all_reduces send 3,670,016 bytes, and 10,230,788 bytes are kept. --sequence saves only
a tenth here, because each pair's first layer keeps its input: the gathered tokens.

Try breaking it, in a copy (cp playground/sequence_parallel.py playground/broken.py):
  1. With --sequence, leave out the all_reduce after backward(). Is there an error?
  2. In AllTokens, return `PairEnd.apply(tokens, *GATHER, self.group)`. Which gradients are wrong?
  3. On rank r, let keep_shard keep the columns or rows r, r + n, r + 2n, ... Is the MLP right?
  4. With --by dtensor --sequence, leave norm1 and norm2 out of the plan. What is wrong?

The next lesson, context_parallel.py, splits the tokens inside attention, too.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import HEADS, TOKENS, WIDTH, make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.splits import show_split


# Here and below, `group` is the process group of the ranks that split a block: all ranks in this
# lesson, and a tp group in three_axes.py, which imports what is below.
def add_up(terms, group):
    """Return the sum of the terms of all ranks of the group, for all tokens."""
    total = terms.clone()
    dist.all_reduce(total, group=group)
    return total


def add_up_own(terms, group):
    """Return the sum of the terms of all ranks of the group, for the tokens of this rank."""
    chunks = [chunk.contiguous() for chunk in terms.chunk(dist.get_world_size(group), dim=1)]
    own_sum = torch.empty_like(chunks[0])
    dist.reduce_scatter(own_sum, chunks, group=group)
    return own_sum


def gather(tokens, group):
    """Return the tokens of all ranks of the group. Each passes its own, (N, tokens / n, width)."""
    tokens = tokens.contiguous()  # all_gather needs this, and some gradients are not contiguous
    chunks = [torch.empty_like(tokens) for _ in range(dist.get_world_size(group))]
    dist.all_gather(chunks, tokens, group=group)
    return torch.cat(chunks, dim=1)


def unchanged(tensor, group):
    """Return the tensor itself. No message is sent."""
    return tensor


# NEW: the kinds of ends that a pair of layers can have. Each is two functions: the first is called
# in forward(), and the second in backward().
COPY = (unchanged, add_up)
ADD = (add_up, unchanged)
GATHER = (gather, add_up_own)
SCATTER = (add_up_own, gather)


class PairEnd(torch.autograd.Function):
    """One end of a pair: Copy or Add of tensor_parallel.py, or GATHER or SCATTER."""

    @staticmethod
    def forward(ctx, tokens, in_forward, in_backward, group):
        """Return what the first function returns."""
        ctx.in_backward = in_backward
        ctx.group = group
        return in_forward(tokens, group)

    @staticmethod
    def backward(ctx, gradient):
        """Return what the second function returns, and None for the other arguments."""
        return ctx.in_backward(gradient, ctx.group), None, None, None


def keep_shard(parameter, dim, group):
    """Return a new parameter with this rank's shard of a parameter."""
    shards = parameter.detach().chunk(dist.get_world_size(group), dim)
    shard = shards[dist.get_rank(group)].clone()
    return torch.nn.Parameter(shard, requires_grad=parameter.requires_grad)


class SplitBlock(torch.nn.Module):
    """A block of a transformer. Each rank has some heads, and some columns of the MLP.

    The block has norm1, attention (with the layers query, key, value and output), norm2 and mlp
    (whose layers 0 and 2 are linear). Attention computes as many heads as its query layer returns.
    """

    def __init__(self, block, sequence, group):
        super().__init__()
        self.norm1 = block.norm1
        self.attention = block.attention
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.group = group
        for layer in (self.attention.query, self.attention.key, self.attention.value, self.mlp[0]):
            # NEW: the columns of a head follow each other, so each rank gets whole heads.
            layer.weight = keep_shard(layer.weight, dim=0, group=group)
            layer.bias = keep_shard(layer.bias, dim=0, group=group)
        # The bias that follows a pair is added once, after the sum over the ranks.
        self.bias1 = self.attention.output.bias
        self.bias2 = self.mlp[2].bias
        for layer in (self.attention.output, self.mlp[2]):
            layer.weight = keep_shard(layer.weight, dim=1, group=group)
            layer.bias = None
        if sequence:
            self.begin = GATHER
            self.end = SCATTER
        else:
            self.begin = COPY
            self.end = ADD

    def forward(self, tokens):
        """Turn tokens into tokens: all of them, or with --sequence those of this rank."""
        terms = self.attention(PairEnd.apply(self.norm1(tokens), *self.begin, self.group))
        tokens = tokens + PairEnd.apply(terms, *self.end, self.group) + self.bias1
        terms = self.mlp(PairEnd.apply(self.norm2(tokens), *self.begin, self.group))
        return tokens + PairEnd.apply(terms, *self.end, self.group) + self.bias2

    def whole_parameters(self):
        """Return the parameters that are not split."""
        return [*self.norm1.parameters(), *self.norm2.parameters(), self.bias1, self.bias2]


class OwnTokens(torch.nn.Module):
    """Before the first block: keep the tokens of this rank."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, tokens):
        """Turn all tokens, (N, tokens, width), into those of this rank."""
        chunks = tokens.chunk(dist.get_world_size(self.group), dim=1)
        # A copy, so that the memory of all tokens can be freed.
        return chunks[dist.get_rank(self.group)].contiguous()


class AllTokens(torch.nn.Module):
    """After the last block: give each rank all tokens. So all ranks compute the same loss."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, tokens):
        """Turn the tokens of this rank into all tokens, (N, tokens, width)."""
        all_tokens = gather(tokens.detach(), self.group)
        chunks = list(all_tokens.chunk(dist.get_world_size(self.group), dim=1))
        # NEW: of all tokens, only this rank's own stay connected to autograd. Their gradient is
        # whole, because each rank computes all of what follows. GATHER would add it up n times.
        chunks[dist.get_rank(self.group)] = tokens
        return torch.cat(chunks, dim=1)


def split_by_hand(model, sequence, group):
    """Split the blocks, and with --sequence the tokens.

    Returns the parameters whose gradients must be added up over the ranks.
    """
    added_up = []
    for stage in (model.stage1, model.stage2):
        for index, layer in enumerate(stage):
            if hasattr(layer, "attention"):
                stage[index] = SplitBlock(layer, sequence, group)
                added_up += stage[index].whole_parameters()
    if not sequence:
        return []  # all ranks have all tokens, so they compute the same gradients
    # Each rank embeds all tokens, but only its own get a gradient (see OwnTokens).
    added_up += model.stage1[0].parameters()
    model.stage1.insert(1, OwnTokens(group))
    model.stage2.insert(len(model.stage2) - 1, AllTokens(group))
    return added_up


def split_by_dtensor(model, mesh, sequence):
    """Let PyTorch split the blocks, and with --sequence the tokens."""
    # How tokens lie between the pairs: each rank has a shard along dimension 1, or a replica.
    between = Shard(1) if sequence else Replicate()
    # NEW: this turns that layout into a replica before attention and before the MLP, as GATHER or
    # COPY does. Without it, query, key and value would send a message each.
    begin = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    plan = {}  # what happens at each layer, by its name
    for name, layer in model.named_modules():
        if hasattr(layer, "attention"):
            plan[f"{name}.attention"] = begin
            plan[f"{name}.mlp"] = begin
            for column in ("attention.query", "attention.key", "attention.value", "mlp.0"):
                plan[f"{name}.{column}"] = ColwiseParallel()
            for row in ("attention.output", "mlp.2"):
                plan[f"{name}.{row}"] = RowwiseParallel(output_layouts=between)  # ADD or SCATTER
            if sequence:
                # NEW: tells DTensor that each rank has a part of the gradients of these layers.
                plan[f"{name}.norm1"] = SequenceParallel()
                plan[f"{name}.norm2"] = SequenceParallel()
    if sequence:
        whole = Replicate()
        own = Shard(1)
        # NEW: these do what OwnTokens and AllTokens do. The parameters of the last layer are plain
        # tensors, so its input must be one, too: use_local_output.
        to_own = PrepareModuleOutput(output_layouts=whole, desired_output_layouts=own)
        to_all = PrepareModuleInput(
            input_layouts=own, desired_input_layouts=whole, use_local_output=True
        )
        plan["stage1.0"] = to_own
        plan[f"stage2.{len(model.stage2) - 1}"] = to_all
    parallelize_module(model, mesh, plan)


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


def run_epoch(model, loader, device, added_up, optimizer=None):
    """Train, or only test if there is no optimizer. Returns sums over all images."""
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
            for parameter in added_up:
                # NEW: each rank has the part that comes from its own tokens.
                dist.all_reduce(parameter.grad)
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    return sums.tolist()  # each rank has seen all images, so nothing is left to add up


def train(args):
    """Train and test, and print one line for each epoch. Then count the messages of a step."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    train_loader, test_loader = loaders(args)  # all ranks read the same images
    torch.manual_seed(args.seed)
    model = make_model(args)
    if args.by == "hand":
        group = dist.group.WORLD
        added_up = split_by_hand(model, args.sequence, group)
    else:
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        group = mesh.get_group()
        group.set_timeout(timedelta(seconds=args.timeout))
        split_by_dtensor(model, mesh, args.sequence)
        # NEW: nothing is left to add up here. DTensor adds up LayerNorm's gradients when they are
        # read. (Adam reads each three times in a step, so 24 all_reduces are counted.) For the
        # biases and the embedding, it has gathered the gradients of all tokens in backward().
        added_up = []
    model = model.to(device)
    # On GPUs, Adam would update many tensors in one call, which fails if some are DTensors and some
    # are not. foreach=False makes it update one after the other, as on CPUs.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, foreach=False)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, added_up, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device, added_up)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    batches = [next(iter(train_loader))]
    arguments = (model, batches, device, added_up, optimizer)
    show_split(lambda: run_epoch(*arguments), model, optimizer, args, group)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    parser.set_defaults(model="transformer")
    add = parser.add_argument
    add("--by", choices=["hand", "dtensor"], default="hand", help="this file, or DTensors")
    add("--sequence", action="store_true", help="between the pairs, each rank has some tokens only")
    args = parser.parse_args()
    check(parser, args, replicas=1)  # guard rail: refuses impossible flags
    if args.model != "transformer":
        parser.error(f"--model {args.model} has no heads to split: use --model transformer")
    world_size = int(os.environ["WORLD_SIZE"])
    heads = args.heads or HEADS
    if heads % world_size:
        nearest = max(1, round(heads / world_size)) * world_size
        width = args.width or WIDTH["transformer"]
        width = max(1, round(width / nearest)) * nearest
        wrong = f"--heads {heads} cannot be divided by {world_size} processes"
        parser.error(f"{wrong}: use --heads {nearest} --width {width}")
    tokens = args.tokens or TOKENS
    if args.sequence and tokens % world_size:
        wrong = f"--tokens {tokens} cannot be divided by {world_size} processes"
        possible = [count for count in range(world_size, 785, world_size) if 784 % count == 0]
        if not possible:
            parser.error(f"{wrong}, and no number that divides 784 can: leave --sequence out")
        nearest = min(possible, key=lambda count: abs(count - tokens))
        parser.error(f"{wrong}: use --tokens {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
