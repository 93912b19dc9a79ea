"""Sequence parallelism: between the split layers of a transformer, each rank has some tokens only.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/transformer/sequence_parallel.py

It prints the same numbers as `single_gpu.py --model transformer`, up to rounding (with `--double`
all twelve digits agree), and then what autograd keeps for `backward()` on each rank:
    rank 0 keeps 9,249,792 bytes
    rank 1 keeps 9,249,792 bytes

In `head_parallel.py`, whose ranks keep 10,224,640 bytes, every rank computes the residual sums and
norms of all tokens between two pairs of layers. Here each rank does so for its own tokens only:
between the pairs, tokens are split, S1 in the letters of `placements.py`. Other messages begin and
end a pair (https://arxiv.org/abs/2205.05198):

              in head_parallel.py      here
    a pair    forward     backward     forward                     backward
    begins    nothing     all_reduce   all_gather of all tokens    reduce_scatter
    ends      all_reduce  nothing      reduce_scatter of terms     all_gather

By a ring, an all_reduce sends as many bytes as an all_gather and a reduce_scatter together. A tenth
of the memory is saved here, and not more, because the first layer of a pair keeps its input, which
is all tokens. Megatron-LM keeps a rank's own tokens, and gathers the others again in `backward()`,
while it computes the gradient of the input. The reduce_scatter travels while the gradient of the
weights is computed. (Async TP cuts a product into parts, and sends one beside the next.)

What is not split, such as a LayerNorm, now sees only the tokens of one rank. So its gradient is a
term (P), and an all_reduce adds up the terms. After the last block, each rank gets all tokens.

With `--by dtensor`, PyTorch's DTensor does the same. To clip gradients there, first add up those
that are P (`p.grad = p.grad.redistribute(placements=[Replicate()])`). Then add up
squares, as `tensor_parallel.py` says.

Try breaking it, in a copy beside it, with `--double`, and compare the losses:
  1. Leave out the loop with `register_hook`. Is there an error?
  2. In the last Exchange, write reduce_scatter in place of own_tokens. Which gradients are wrong?
  3. With `--by dtensor`, leave norm1 and norm2 out of the plan. What is wrong?
Now repair `halves_of_texts.py` and `twins.py` in `playground/museum/`.
Builds on: head_parallel.py
The next lesson, `vocabulary_parallel.py`, splits the layers that have a row for each word.
"""

import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import ROW, fetch, loaders
from common.models import make_model


# Here and below, `group` has the ranks that split a block. None means all ranks, as in this lesson.
# Tokens are (N, tokens, width), and each rank has equally many.
def own_tokens(tokens, group):
    """Return the tokens of this rank. Nothing is sent."""
    if tokens.shape[1] % dist.get_world_size(group):
        raise ValueError(f"the ranks cannot split {tokens.shape[1]} tokens equally")
    return tokens.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)].contiguous()


def all_gather(tokens, group):
    """Return the tokens of all ranks."""
    chunks = [torch.empty_like(tokens) for _ in range(dist.get_world_size(group))]
    # NEW: [11 22] on rank 0 and [33 44] on rank 1 become [11 22 33 44] on both.
    dist.all_gather(chunks, tokens, group=group)
    return torch.cat(chunks, dim=1)


def reduce_scatter(terms, group):
    """Return the sum of the terms of all ranks, for the tokens of this rank."""
    chunks = [chunk.contiguous() for chunk in terms.chunk(dist.get_world_size(group), dim=1)]
    own_sum = torch.empty_like(chunks[0])
    # NEW: [1 2 3 4] on rank 0 and [10 20 30 40] on rank 1 become [11 22] and [33 44].
    dist.reduce_scatter(own_sum, chunks, group=group)
    return own_sum


class Exchange(torch.nn.Module):
    """A message as a layer."""

    def __init__(self, send, send_back, group):
        super().__init__()
        self.message = (send, send_back, group)

    def forward(self, tokens):
        """Return the tokens that this rank has afterwards."""
        return Message.apply(tokens, *self.message)


def split_by_hand(model, group):
    """Split the blocks of a transformer, and between their pairs of layers the tokens."""
    # NEW: in a pair, every rank uses all tokens, so a token's gradient is a sum over the ranks.
    # Where a pair ends, a rank has its own tokens' gradient, but its term needs that of all tokens.
    begin = (all_gather, reduce_scatter)
    end = (reduce_scatter, all_gather)
    between = torch.nn.ModuleList([*model.stage1[1:], *model.stage2[:-1]])  # on own tokens
    blocks = torch.nn.ModuleList(layer for layer in between if hasattr(layer, "attention"))
    if not blocks or {*between.parameters()} - {*blocks.parameters()}:
        raise ValueError("between the first and the last layer, all must be blocks with .attention")
    of_own_tokens = []  # parameters whose gradient is that of own tokens
    for stage in (model.stage1, model.stage2):
        for index, layer in enumerate(stage):
            if hasattr(layer, "attention"):
                block = SplitBlock(layer, begin, end, group)
                stage[index] = block
                of_own_tokens += [*block.norm1.parameters(), *block.norm2.parameters()]
                of_own_tokens += [bias for bias in (block.bias1, block.bias2) if bias is not None]
    for parameter in of_own_tokens:
        # A frozen parameter may be unfrozen later, and PyTorch gives a hook only to a trained one.
        trained = parameter.requires_grad
        # NEW: add up the terms. If a bias's gradients from four tokens are 1, 2, 3 and 4, rank 0
        # has 3, rank 1 has 7, and the hook returns 10. (fully_shard would replace the parameter,
        # and drop its hook without an error. With FSDP, use DTensor.)
        parameter.requires_grad_().register_hook(partial(all_reduce, group=group))
        parameter.requires_grad_(trained)
    # NEW: all ranks have computed the embedding of all tokens, so it needs the gradients of all.
    model.stage1.insert(1, Exchange(own_tokens, all_gather, group))
    # NEW: from here on, all ranks compute the same loss of all tokens. So each has the whole
    # gradient already, and keeps that of its own tokens, as message_gradients.py shows.
    model.stage2.insert(len(model.stage2) - 1, Exchange(all_gather, own_tokens, group))


def split_by_dtensor(model, mesh):
    """Let PyTorch split the blocks, and between their pairs of layers the tokens."""
    whole = Replicate()
    own = Shard(1)
    begin = PrepareModuleInput(input_layouts=own, desired_input_layouts=whole)  # an all_gather
    plan = {}  # what happens at each layer, by its name
    for name, layer in model.named_modules():
        if hasattr(layer, "attention"):
            plan[f"{name}.attention"] = begin
            plan[f"{name}.mlp"] = begin
            *mlp_columns, mlp_row = [f"mlp.{inner}" for inner in mlp_layers(layer.mlp)]
            for column in ("attention.query", "attention.key", "attention.value", *mlp_columns):
                plan[f"{name}.{column}"] = ColwiseParallel()
            for row in ("attention.output", mlp_row):
                plan[f"{name}.{row}"] = RowwiseParallel(output_layouts=own)  # a reduce_scatter
            # NEW: their parameters' gradients become P. DTensor adds up the terms each time the
            # optimizer reads them, which Adam does three times in a step.
            plan[f"{name}.norm1"] = SequenceParallel()
            plan[f"{name}.norm2"] = SequenceParallel()
    # NEW: these do what the two layers Exchange do. The parameters of the last layer are plain
    # tensors, so its input must be one, too: use_local_output.
    to_own = PrepareModuleOutput(output_layouts=whole, desired_output_layouts=own)
    to_all = PrepareModuleInput(
        input_layouts=own, desired_input_layouts=whole, use_local_output=True
    )
    plan["stage1.0"] = to_own
    plan[f"stage2.{len(model.stage2) - 1}"] = to_all
    parallelize_module(model, mesh, plan)


# You can stop here: what follows reads the flags.


def check_flags(parser, args, world_size):
    """Refuse a model that the ranks cannot split. The batch is never split."""
    if args.model in ("mlp", "cnn"):
        parser.error(f"tensor_parallel.py splits --model {args.model}: use transformer here")
    heads = args.heads
    # In a language model, two heads share their keys and values.
    unit = 2 * world_size if args.model == "language" else world_size
    if heads % unit:
        near = max(1, round(heads / unit)) * unit
        parser.error(f"{world_size} ranks cannot split --heads {heads}: use {near}")
    tokens = ROW if args.model == "language" else args.tokens
    if tokens % world_size:
        parser.error(f"{world_size} ranks cannot split {tokens} tokens: use head_parallel.py")


# ---------- Unchanged from message_gradients.py ----------
# You know what follows: Message() and all_reduce(). If you copy this lesson, copy this, too.


class Message(torch.autograd.Function):
    """A message with a gradient.

    An autograd.Function is a function with a gradient of our own. Its `apply` calls forward().
    Later, autograd calls backward() with the gradient of the output, and takes what it returns as
    the gradient of the input. What backward() needs, forward() keeps in `ctx`.
    """

    @staticmethod
    def forward(ctx, x, send, send_back, group):
        """Send x. Returns what arrives. `group` has the ranks that take part; None: all."""
        ctx.back = (send_back, send, group)
        return send(x.contiguous(), group)  # messages need contiguous memory

    @staticmethod
    def backward(ctx, gradient):
        """Send the gradient of what has arrived. Returns the gradient of x."""
        # The gradient of a message is a message, which has a gradient, too.
        gradient = Message.apply(gradient, *ctx.back)
        return gradient, None, None, None  # the other arguments of forward() have no gradient


def all_reduce(x, group):
    """Return the sum of all ranks' tensors."""
    total = x.clone()  # all_reduce overwrites its tensor, and autograd may need x elsewhere
    dist.all_reduce(total, group=group)
    return total


# ---------- Unchanged from head_parallel.py ----------
# You know what follows: train(), SplitBlock(), mlp_layers(), plus(), keep_shard(), refuse_state(),
# show_kept(), add_flags(), join(), fit_epoch(), run_epoch() and main(). If you copy this lesson,
# copy this, too.


def train(args):
    """Split a transformer, train it, and show what each rank keeps for backward()."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args)  # all ranks read the same images
    # The same seed on all ranks, because each keeps a shard of the same random parameters.
    torch.manual_seed(args.seed)
    model = make_model(args)
    if args.by == "hand":
        split_by_hand(model, group=None)
    else:
        mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))  # all ranks, in a row
        # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
        mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
        split_by_dtensor(model, mesh)
    model = model.to(device)
    fused = args.by == "hand"  # Adam's fused code refuses DTensors beside plain tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=fused)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    show_kept(model, train_loader, device)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


class SplitBlock(torch.nn.Module):
    """A block of a transformer. Each rank has some heads, and some columns of the MLP.

    It computes what `Block` in `common/transformer.py` computes, and nothing else.
    """

    def __init__(self, block, begin, end, group):
        super().__init__()
        self.begin = begin  # the messages where a pair of layers begins: forward, backward
        self.end = end  # the same where a pair ends
        self.norm1 = block.norm1
        self.attention = block.attention
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.group = group
        if {*block.parameters()} - {*self.parameters()}:
            raise ValueError("this block has parameters of its own, which would be left out")
        attention = self.attention
        *mlp_columns, mlp_row = mlp_layers(self.mlp).values()
        columns = (attention.query, attention.key, attention.value, *mlp_columns)
        others = {*attention.parameters(), *self.mlp.parameters()}
        for layer in (*columns, attention.output, mlp_row):
            others -= {*layer.parameters()}
        if others:  # such as a norm of each head: a rank's gradient would lack those of other heads
            raise ValueError("only linear layers can be between the two ends of a pair")
        heads = attention.key.out_features // attention.size  # of the keys; the queries have more
        if heads % dist.get_world_size(group):
            raise ValueError(
                f"{dist.get_world_size(group)} ranks cannot split {heads} heads of keys"
            )
        for layer in columns:
            # The columns of a head follow each other, so each rank gets whole heads. (Not if
            # one layer computes q, k and v, or gate and up: split it into its parts first.)
            # Attention finds the number of its heads from that of its columns: n times fewer.
            layer.weight = keep_shard(layer.weight, dim=0, group=group)
            if layer.bias is not None:
                layer.bias = keep_shard(layer.bias, dim=0, group=group)
        # The bias at the end of a pair is added once, after the sum over the ranks.
        self.bias1 = attention.output.bias
        self.bias2 = mlp_row.bias
        for layer in (attention.output, mlp_row):
            layer.weight = keep_shard(layer.weight, dim=1, group=group)
            layer.bias = None
        self.register_state_dict_pre_hook(refuse_state)

    def forward(self, tokens):
        """Turn tokens, (N, tokens, width), into tokens."""
        inputs = Message.apply(self.norm1(tokens), *self.begin, self.group)
        read = Message.apply(self.attention(inputs), *self.end, self.group)
        tokens = tokens + plus(read, self.bias1)
        inputs = Message.apply(self.norm2(tokens), *self.begin, self.group)
        computed = Message.apply(self.mlp(inputs), *self.end, self.group)
        return tokens + plus(computed, self.bias2)


def mlp_layers(mlp):
    """Return the linear layers of an MLP by name. The last one made is split by rows."""
    layers = mlp.named_modules()
    return {name: layer for name, layer in layers if isinstance(layer, torch.nn.Linear)}


def plus(total, bias):
    """Return the sum and its bias, if there is one. The layers of --model language have none."""
    return total if bias is None else total + bias


def keep_shard(parameter, dim, group):
    """Return this rank's shard of a parameter, as a new parameter."""
    world_size = dist.get_world_size(group)
    if parameter.shape[dim] % world_size:
        raise ValueError(f"{world_size} ranks cannot split {parameter.shape[dim]} rows or columns")
    shard = parameter.detach().chunk(world_size, dim)[dist.get_rank(group)].clone()
    return torch.nn.Parameter(shard, requires_grad=parameter.requires_grad)


def refuse_state(layer, *_):
    """Refuse state_dict(), because all ranks' shards have the same names, as replicas have."""
    if dist.get_world_size(layer.group) > 1:
        wrong = "a layer is split, and a checkpoint would take its shards for replicas"
        raise RuntimeError(
            f"{wrong}: torch.save [*model.parameters()] of each rank, or use DTensors"
        )


def show_kept(model, loader, device):
    """Print the bytes that autograd keeps for backward() on each rank, besides the parameters."""
    storages = {}  # the memory behind tensors, by its address

    def note(tensor):
        """Note a tensor that autograd keeps."""
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storages[local.untyped_storage().data_ptr()] = local.untyped_storage()
        return tensor

    images, _ = next(iter(loader))
    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(images.to(device))
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        storages.pop(local.untyped_storage().data_ptr(), None)
    kept = sum(storage.nbytes() for storage in storages.values())
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, f"rank {dist.get_rank()} keeps {kept:,} bytes")
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def add_flags(parser):
    """Add the flag that only this lesson has."""
    parser.set_defaults(model="transformer")
    help = "what splits the layers: this file, or PyTorch's DTensor"
    parser.add_argument("--by", choices=["hand", "dtensor"], default="hand", help=help)


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
