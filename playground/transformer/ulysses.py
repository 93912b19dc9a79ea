"""Ulysses: each rank computes some tokens of a sequence, and in attention all tokens of some heads.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/transformer/ulysses.py

It trains a small language model, which predicts the next byte of a text. The bytes are its tokens,
and a sequence has 128 of them. It prints the same numbers as `single_gpu.py --model language`, up
to rounding (with `--double` all twelve digits agree), and then what each rank has (a single one
keeps 189,759,488 bytes):
    rank 0 has 64 of 128 tokens, and keeps 94,879,744 bytes
    rank 1 has 64 of 128 tokens, and keeps 94,879,744 bytes

The activations of a long sequence may not fit on one GPU. With context parallelism, each rank has
its own tokens everywhere, and all parameters. A norm, an MLP and the loss treat each token by
itself, so they need no message. Only attention reads other tokens.

But a head of attention needs no other head. So inside attention, the ranks split the heads, and an
all_to_all gives each rank all tokens of its own heads. PyTorch's attention computes these, and
another all_to_all brings the results back to the ranks of their tokens
(`playground/pages/figures/split.svg`). Here are the heads A and B of the tokens 0 to 3:

    own tokens, all heads    rank 0: A0 A1 B0 B1    rank 1: A2 A3 B2 B3
    all_to_all               rank 0: A0 A1 A2 A3    rank 1: B0 B1 B2 B3

Queries, keys and values need an all_to_all each, and the result a fourth. Their gradients are
all_to_alls, too (`message_gradients.py`). Everything else is data parallelism: all ranks have the
same parameters and equally many tokens, so DDP averages their gradients. (If some labels are -100,
the ranks' numbers are unequal: see `token_mean.py`. For packed documents, attention needs the mask
of the whole row here, because `split_tokens` replaces the one that `token_mean.py` has set.)

The number of ranks must divide the heads of the keys and values (or these are repeated before, and
more is sent). In this model, two heads share theirs, so four heads allow two ranks. The ring of the
next lesson works with any number of heads, but with more ranks it sends more bytes
(https://arxiv.org/abs/2309.14509).

Try breaking it, in a copy beside it, with `--double`, and compare the losses:
  1. Write `parallel = model`, without DDP. Is there an error?
  2. In `exchange`, replace `Message.apply(...)` with `all_to_all(parts, group)`. What is lost?
  3. In `split_tokens`, leave out `module.positions = mine`. Where in the sequence does rank 1 take
     its tokens to be?
Builds on: sequence_parallel.py
The next lesson, `context_parallel.py`, lets the keys and values travel around a ring.
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
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import ROW, fetch, loaders
from common.models import make_model
from common.transformer import Attention


# Here and below, `group` has the ranks that split a sequence. None means all ranks, as in this
# lesson.
def exchange(parts, group):
    """Send part r of a list to rank r. Returns a list of what arrives, part r from rank r."""
    parts = torch.stack(parts)
    # NEW: backward() sends the gradient of each part back to its rank, also by an all_to_all.
    return list(Message.apply(parts, all_to_all, all_to_all, group))


def to_heads(tensor, group):
    """Turn (N, all heads, own tokens, size) into (N, own heads, all tokens, size)."""
    heads_of_ranks = tensor.chunk(dist.get_world_size(group), dim=1)
    return torch.cat(exchange(heads_of_ranks, group), dim=2)


def to_tokens(tensor, group):
    """Turn (N, own heads, all tokens, size) into (N, all heads, own tokens, size)."""
    tokens_of_ranks = tensor.chunk(dist.get_world_size(group), dim=2)
    return torch.cat(exchange(tokens_of_ranks, group), dim=1)


def ulysses_attention(query, key, value, group):
    """Return what this rank's tokens read from all tokens, in the shape of `query`."""
    # NEW: this rank gets all tokens of its heads, in their order, as is_causal=True needs them.
    query = to_heads(query, group)
    key = to_heads(key, group)
    value = to_heads(value, group)
    read = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return to_tokens(read, group)


def attend_to_all(attention, attend, inputs):
    """Turn this rank's tokens, (N, own tokens, width), into what they have read from all tokens."""
    query, key, value = attention.project(inputs)
    read = attend(query, key, value)
    return attention.output(read.transpose(1, 2).flatten(2))


def split_tokens(model, attend, mine):
    """Let each rank compute its own tokens. All ranks keep the whole model.

    Args:
        model: any module with layers of common.transformer.Attention, causal and without a window.
            All other layers must compute each token alone (no convolution along the tokens), and a
            table of positions must be read at `mine`, not at arange(tokens).
        attend: turns queries, keys and values of this rank's tokens into what they read.
        mine: the positions of this rank's tokens in the sequence. All ranks have equally many.
    """
    found = [module for module in model.modules() if isinstance(module, Attention)]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (len(mine), len(found)))
    counts, layers = zip(*everyone, strict=True)
    if len({*counts}) > 1:
        raise ValueError(f"the ranks have unequal numbers of tokens: {[*counts]}")
    if not any(layers):  # a stage of a pipeline may have none
        raise ValueError("no layer Attention was found, so tokens would see only their own rank's")
    for module in found:
        # NEW: attention gets a different forward(). All other modules stay as they are.
        module.forward = partial(attend_to_all, module, attend)
        # NEW: queries and keys are rotated by their true positions, and not by 0, 1, 2 ...
        module.positions = mine


def keep_own_tokens(loader, mine):
    """Leave only this rank's tokens in a loader's rows of text, and in their labels."""
    # NEW: common/data.py has shifted the labels already: each is the next byte of the text. It
    # would be too late to shift them here, because the byte after a chunk is on another rank.
    rows = loader.dataset  # its images are bytes of the text
    rows.images = rows.images[:, mine]
    rows.labels = rows.labels[:, mine]


def train(args):
    """Train a language model whose tokens are split, and show what each rank has of them."""
    rank, device = join(args)
    mine = torch.arange(ROW).chunk(dist.get_world_size())[rank]
    train_loader, test_loader = loaders(args)  # all ranks read the same rows
    for loader in (train_loader, test_loader):
        keep_own_tokens(loader, mine)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    split_tokens(model, partial(ulysses_attention, group=None), mine)
    # NEW: each rank has the loss of its own tokens. All have equally many, so the loss of a batch
    # is the average over the ranks, and so is its gradient, as in data parallelism.
    parallel = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, parallel, optimizer, train_loader, test_loader, device, args)
    show_tokens(model, mine, train_loader, device)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del parallel
    dist.destroy_process_group()


# You can stop here: what follows only prints, and reads the flags.


def show_tokens(model, mine, loader, device):
    """Print how many tokens each rank has, and what autograd keeps for backward()."""
    kept = count_kept(model, loader, device)
    rows = [None] * dist.get_world_size()
    row = f"rank {dist.get_rank()} has {len(mine)} of {ROW} tokens, and keeps {kept:,} bytes"
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def count_kept(model, loader, device):
    """Return the bytes that autograd keeps for backward() of a batch, besides the parameters."""
    storages = {}  # the memory behind tensors, by its address: what shares memory counts once

    def note(tensor):
        """Note a tensor that autograd keeps."""
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    rows, _ = next(iter(loader))
    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(rows.to(device))
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


def add_flags(parser):
    """This lesson has no flags of its own. It trains the language model by default."""
    parser.set_defaults(model="language")


def check_flags(parser, args, world_size):
    """Refuse another model, and tokens or heads that the ranks cannot split."""
    if args.model != "language":
        parser.error(f"--model {args.model} reads images: use --model language")
    if ROW % world_size:
        parser.error(f"{world_size} ranks cannot split {ROW} tokens: use 2, 4 or 8 ranks")
    unit = 2 * world_size  # two heads share their keys and values
    if args.heads % unit:
        near = max(1, round(args.heads / unit)) * unit
        parser.error(f"{world_size} ranks cannot split --heads {args.heads}: use {near}")


# ---------- Unchanged from message_gradients.py ----------
# You know what follows: Message(), all_to_all(). If you copy this lesson, copy this, too.


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


def all_to_all(x, group):
    """Send chunk r to rank r. Returns what arrives, chunk r from rank r."""
    arrived = torch.empty_like(x)
    dist.all_to_all_single(arrived, x, group=group)
    return arrived


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
