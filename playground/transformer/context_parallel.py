"""Context parallelism: the keys and values of all tokens come to a rank, and the queries stay.

Run it, by an all_gather, and then by a ring:
    torchrun --standalone --nproc-per-node 2 playground/transformer/context_parallel.py
    torchrun --standalone --nproc-per-node 2 playground/transformer/context_parallel.py --by ring

Both print the same numbers as `single_gpu.py --model language`, up to rounding (with `--double` all
twelve digits agree), and then what each rank has. With the first command:
    rank 0 has 64 of 128 tokens, reads 4,128 scores, and keeps 99,139,584 bytes
    rank 1 has 64 of 128 tokens, reads 4,128 scores, and keeps 99,139,584 bytes

As in `ulysses.py`, each rank has its own tokens, and only attention needs those of other ranks.
Here a rank keeps its queries, so any number of heads will do.

**By an all_gather** (`gathered_attention`), each rank gets the keys and values of all tokens, as
Llama 3 did (https://arxiv.org/abs/2407.21783). In `backward()`, each rank has a term of their
gradients, and a reduce_scatter adds up the terms and leaves each rank those of its own tokens.

**By a ring** (`ring_attention`, https://arxiv.org/abs/2310.01889), a rank first computes what its
queries read from its own chunk, which is the keys and values of its tokens. Then each rank sends
the chunk that it has to the next rank, and its queries read from the chunk that arrives. After
n - 1 such steps, every chunk has been on every rank: `playground/pages/figures/ring_attention.svg`.
With `checkpoint()`, autograd keeps only the inputs of the ring (so a rank keeps 90,423,296 bytes),
and `backward()` runs it again. (Libraries send chunks in `backward()`, too, while they compute.)

A token with the scores s reads the mean of the values, weighted with softmax(s). In the ring, no
rank has all scores of a token, but the means over the chunks can be merged. A chunk's weight is
proportional to the sum of its exp(s), or e^L with L = log(sum(exp(s))). An example with 2 for e:
    chunk 1    s = 1 1    values 6 0    mean 3      L = log2(2 + 2) = 2
    chunk 2    s = 2 2    values 3 6    mean 4.5    L = log2(4 + 4) = 3
    merged     weights 4/12 and 8/12, the softmax of the two L, so 3 * 1/3 + 4.5 * 2/3 = 4

**Equal work**: a token reads itself and those before it. With `--order plain`, rank 0 has the first
half of the tokens, reads 2,080 scores of each head and row, and rank 1 reads 6,176. With `--order
zigzag`, the default, each rank has some early tokens and some late ones
(`playground/pages/figures/context.svg`, with four ranks). Here all scores are computed, and then
those that no token reads are masked. Kernels such as FlexAttention skip whole blocks of these, so
the rank that reads most would let the others wait.

Try breaking it, in a copy beside it, with `--by ring --double`, and compare the losses:
  1. In `attend_to_chunk`, return `mean, torch.zeros_like(log)`. With which number of ranks is this
     no fault?
  2. Pass a chunk on by `to_next(chunk, group)`, without Message. Which gradients are lost?
  3. With 2 ranks and `--by ring --order plain --timeout 10`, let rank 0 skip what it cannot read:
     before the line with `attend_to_chunk`, write `if later.all(): continue`. Why does rank 1 wait
     in `backward()`, although rank 0 has received every chunk?
Now write `ring_attention.py` in `playground/exercises/`.
Builds on: ulysses.py
The next lesson, `expert_parallel.py`, gives each rank different parameters, and sends it tokens.
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
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import ROW, fetch, loaders
from common.models import make_model
from common.transformer import Attention


# Here and below, positions[r] has the positions of rank r's tokens in the sequence. `group` has the
# ranks that split a sequence. None means all ranks, as in this lesson.
# PyTorch's own context parallelism is experimental, and does not run on CPUs. So this is by hand.
def gathered_attention(query, key, value, positions, group):
    """Return what this rank's tokens read from all tokens, in the shape of `query`.

    The inputs are of this rank's tokens, (N, heads, own tokens, size).
    """
    own = torch.stack([key, value]).unsqueeze(0)
    # NEW: chunk r is of rank r. backward() adds up the gradients that all ranks have for it.
    chunks = Message.apply(own, all_gather, reduce_scatter, group)
    keys, values = torch.cat(list(chunks), dim=-2)
    # NEW: which tokens each of mine may read. The keys are in the order of the ranks.
    mine = positions[dist.get_rank(group)].to(query.device)
    reads = torch.cat(list(positions)).to(query.device) <= mine[:, None]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=reads, enable_gqa=True)


def ring_attention(query, key, value, positions, group):
    """Return the same. In forward(), a rank has the keys and values of one rank only."""
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    # With 16 bits, the scores and L would be wrong in their third digit, so they get 32.
    wide = torch.promote_types(query.dtype, torch.float32)
    # If two heads share their keys and values, four heads become (N, 2, 2, tokens, size), and the
    # two heads of keys and values (N, 2, 1, tokens, size). So PyTorch pairs them by broadcasting.
    query = query.unflatten(1, (key.shape[1], -1)).to(wide)
    chunk = torch.stack([key.unsqueeze(2), value.unsqueeze(2)])
    for step in range(world_size):
        theirs = positions[(rank - step) % world_size]  # whose keys and values are here now
        later = (theirs > positions[rank][:, None]).to(query.device)
        mean, log = attend_to_chunk(query, *chunk.to(wide), later)
        if step == 0:
            read, total = mean, log
        else:
            # NEW: merge the two means. sigmoid(a - b) is the softmax of a and b, for a.
            read = torch.lerp(read, mean, (log - total).sigmoid())
            total = torch.logaddexp(total, log)
        if step < world_size - 1:
            # NEW: to the next rank. backward() sends the gradient of the chunk to the previous one,
            # and so each chunk collects its gradients on the way home.
            chunk = Message.apply(chunk, to_next, to_previous, group)
    return read.flatten(1, 2).to(key.dtype)


def attend_to_chunk(query, keys, values, later):
    """Return the mean of a chunk's values for each query, and L, the log of its sum of exp(s)."""
    scores = query @ keys.mT * query.shape[-1] ** -0.5  # PyTorch's scale
    # NEW: not -inf, from which softmax makes NaN if a token reads nothing of this chunk. With this
    # number, the weight of such a chunk is exactly 0, because each token reads at least itself.
    scores = scores.masked_fill(later, -1e30)
    mean = scores.softmax(dim=-1) @ values
    log = scores.logsumexp(dim=-1, keepdim=True)
    return mean, log


WAYS = {"gather": gathered_attention, "ring": ring_attention}


# ---------- Equal work: which tokens a rank has ----------


def plain(tokens, world_size):
    """Return the positions of each rank's tokens: one part of the sequence after another."""
    return torch.arange(tokens).chunk(world_size)


def zigzag(tokens, world_size):
    """Return the positions of each rank's tokens: a chunk near the start, and one near the end."""
    # NEW: early tokens read few others, and late ones many. With two ranks and the chunks 0, 1, 2
    # and 3, rank 0 has 0 and 3, rank 1 has 1 and 2, and both read equally many scores.
    chunks = torch.arange(tokens).chunk(2 * world_size)
    pairs = zip(chunks[:world_size], reversed(chunks[world_size:]), strict=True)
    return [torch.cat(pair) for pair in pairs]


ORDERS = {"plain": plain, "zigzag": zigzag}


def train(args):
    """Train a language model whose tokens are split, and show what each rank has of them."""
    rank, device = join(args)
    positions = ORDERS[args.order](ROW, dist.get_world_size())
    train_loader, test_loader = loaders(args)  # all ranks read the same rows
    for loader in (train_loader, test_loader):
        keep_own_tokens(loader, positions[rank])
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    attend = partial(WAYS[args.by], positions=positions, group=None)
    if args.by == "ring":
        # NEW: keep only its inputs. backward() calls it again, on all ranks together.
        attend = partial(checkpoint, attend, use_reentrant=False)
    split_tokens(model, attend, positions[rank])
    parallel = DistributedDataParallel(model)  # averages the gradients, as in ulysses.py
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, parallel, optimizer, train_loader, test_loader, device, args)
    show_tokens(model, positions, train_loader, device)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del parallel
    dist.destroy_process_group()


# You can stop here: what follows only prints, and reads the flags.


def show_tokens(model, positions, loader, device):
    """Print how many tokens and scores each rank has, and what autograd keeps for backward()."""
    rank = dist.get_rank()
    mine = positions[rank]
    scores = int((mine + 1).sum())  # token 0 reads one score, token 1 reads two
    line = f"rank {rank} has {len(mine)} of {len(mine) * len(positions)} tokens"
    line += f", reads {scores:,} scores"
    line += f", and keeps {count_kept(model, loader, device):,} bytes"
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if rank == 0:
        print(*lines, sep="\n", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has. It trains the language model by default."""
    parser.set_defaults(model="language")
    add = parser.add_argument
    add("--by", choices=WAYS, default="gather", help="how keys and values come to a rank")
    add("--order", choices=ORDERS, default="zigzag", help="which tokens a rank has")


def check_flags(parser, args, world_size):
    """Refuse another model, and tokens that the ranks cannot split."""
    if args.model != "language":
        parser.error(f"--model {args.model} reads images: use --model language")
    if ROW % (2 * world_size):
        parser.error(f"{world_size} ranks cannot split {ROW} tokens: use 2, 4 or 8 ranks")


# ---------- Unchanged from message_gradients.py ----------
# You know what follows: Message(), all_gather(), reduce_scatter(), shift(), to_next() and
# to_previous(). If you copy this lesson, copy this, too.


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


def all_gather(x, group):
    """Return the tensors of all ranks, one after another in dimension 0. (gloo takes no stack.)"""
    whole = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x, group=group)
    return whole


def reduce_scatter(x, group):
    """Return this rank's chunk of the sum of all ranks' tensors."""
    chunk = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(chunk, x, group=group)
    return chunk


def shift(x, by, group):
    """Send x to the rank that is `by` further in a ring. Returns what arrives from the other."""
    rank = dist.get_rank(group)
    n = dist.get_world_size(group)
    if n == 1:
        return x
    arrived = torch.empty_like(x)
    receive = dist.P2POp(dist.irecv, arrived, group=group, group_peer=(rank - by) % n)
    send = dist.P2POp(dist.isend, x, group=group, group_peer=(rank + by) % n)
    # Receive first. With gloo, the two directions would otherwise take turns.
    for request in dist.batch_isend_irecv([receive, send]):
        request.wait()
    return arrived


def to_next(x, group):
    """Send x to rank r + 1. Returns what rank r - 1 has sent."""
    return shift(x, 1, group)


def to_previous(x, group):
    """Send x to rank r - 1. Returns what rank r + 1 has sent."""
    return shift(x, -1, group)


# ---------- Unchanged from ulysses.py ----------
# You know what follows: attend_to_all(), split_tokens(), keep_own_tokens(), count_kept(), join(),
# fit_epoch(), run_epoch() and main(). If you copy this lesson, copy this, too.


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
        # Attention gets a different forward(). All other modules stay as they are.
        module.forward = partial(attend_to_all, module, attend)
        # Queries and keys are rotated by their true positions, and not by 0, 1, 2 ...
        module.positions = mine


def keep_own_tokens(loader, mine):
    """Leave only this rank's tokens in a loader's rows of text, and in their labels."""
    # Common/data.py has shifted the labels already: each is the next byte of the text. It
    # would be too late to shift them here, because the byte after a chunk is on another rank.
    rows = loader.dataset  # its images are bytes of the text
    rows.images = rows.images[:, mine]
    rows.labels = rows.labels[:, mine]


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
