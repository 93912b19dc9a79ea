"""Context parallelism: each rank computes some of the tokens of each sequence.

Run it, with attention by a ring, and then by all_to_alls:
    torchrun --standalone --nproc-per-node 2 playground/transformer/context_parallel.py
    torchrun --standalone --nproc-per-node 2 playground/transformer/context_parallel.py --by ulysses

It trains a small language model, which predicts the next byte of a text. The bytes are its tokens,
and the sequence length is 128. It prints the same numbers as `single_gpu.py --model language`, up
to rounding (with `--double` all twelve digits agree), and then what each rank has. With the first
command:
    rank 0 has 64 of 128 tokens, and keeps 94,879,744 bytes; it computes 6,144 scores
    rank 1 has 64 of 128 tokens, and keeps 94,879,744 bytes; it computes 6,144 scores

The activations of a long sequence may not fit on one GPU. So each rank has all parameters, but only
its own tokens. Norms, MLPs and the loss treat each token by itself. For attention, the keys and
values of all tokens travel around a ring of ranks, while the queries stay.

Attention is causal: a token reads itself and those before it. So each head has 8,256 scores for a
row, one for each such pair of a query and a key. A rank computes rectangles of scores, and masks
some of them.
With `--order plain`, rank 0 has the first half of the tokens, computes 4,096 scores, and waits for
rank 1, which computes 8,192. With `--order zigzag`, the default, each rank has some early tokens
and some late ones (`playground/pages/figures/context.svg`, with four ranks).

With `--by ulysses`, three all_to_alls give each rank all tokens of some heads, and a fourth sends
the results back (`playground/pages/figures/split.svg`). Two ranks then send three quarters of the
ring's bytes, and with more ranks an even smaller part. But Ulysses needs a number of ranks that
divides the heads of the keys and values. The ring works with any number of heads, and could compute
while it sends.

Try breaking it, in a copy beside it, with `--double`, and compare the losses:
  1. Write `parallel = model`, without DDP. Is there an error?
  2. Leave out `total_of_rows *= correction`. When would this be no fault?
  3. In `backward()`, indent the line with `pass_on(grad_travelling, group)`, so that it is in the
     `if`. Where are the gradients of a rank's keys and values at the end?
Now write `ring_attention.py` in `playground/exercises/`.
Builds on: sequence_parallel.py
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
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import ROW, fetch, loaders
from common.models import make_model
from common.transformer import Attention


# Here and below, positions[r] has the positions of rank r's tokens in the sequence, in ascending
# order. `group` has the ranks that split a sequence. None means all ranks, as in this lesson.
def plain(tokens, world_size):
    """Return the positions of each rank's tokens: one part of the sequence after another."""
    return torch.arange(tokens).chunk(world_size)


def zigzag(tokens, world_size):
    """Return the positions of each rank's tokens: a chunk near the start, and one near the end."""
    # NEW: early tokens read few others, and late ones many. With two ranks and the chunks 0, 1, 2
    # and 3, rank 0 has 0 and 3, rank 1 has 1 and 2, and both compute equally many scores.
    chunks = torch.arange(tokens).chunk(2 * world_size)
    pairs = zip(chunks[:world_size], reversed(chunks[world_size:]), strict=True)
    return [torch.cat(pair) for pair in pairs]


ORDERS = {"plain": plain, "zigzag": zigzag}


def scores_of(query, key, query_positions, key_positions):
    """Return the score of each query and key: -inf if the key's token comes later."""
    scores = query @ key.mT * query.shape[-1] ** -0.5  # the scale that PyTorch's attention has
    later = key_positions.to(scores.device) > query_positions.to(scores.device)[:, None]
    return scores.masked_fill(later, -torch.inf)


def visible(mine, theirs):
    """Return two slices: my tokens that read any of theirs, and theirs that are read.

    The other scores are masked, so they are not computed. An example with 16 tokens and zigzag:
    rank 0 has 0-3 and 12-15, and rank 1 has 4-11. Of rank 0's queries, the last four read all keys
    of rank 1, so it computes 4 x 8 scores. All queries of rank 1 read the first four keys of rank
    0, so it computes 8 x 4. Either slice may be empty.
    """
    first = int((mine < theirs[0]).sum())
    end = int((theirs <= mine[-1]).sum())
    return slice(first, None), slice(0, end)


def pass_on(tensor, group):
    """Send a tensor to the next rank of the ring, and return the previous rank's."""
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return tensor
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=(rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % world_size)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()  # a faster ring would compute a chunk while the next one travels
    return received


# PyTorch's own context parallelism is experimental, and does not run on CPUs. So this is by hand.
class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's tokens to all tokens (https://arxiv.org/abs/2310.01889).

    query, key and value are those of this rank's tokens, (..., own tokens, size). A chunk is the
    keys and values of one rank. All chunks travel around a ring, and the queries stay.
    """

    @staticmethod
    def forward(ctx, query, key, value, positions, group):
        """Return what this rank's tokens have read, of the shape of `query`."""
        rank = dist.get_rank(group)
        world_size = dist.get_world_size(group)
        mine = positions[rank]
        # A token with the scores s_j reads  sum_j exp(s_j) v_j / sum_j exp(s_j),  and exp() of a
        # large score overflows. So both sums are kept divided by exp(m), where m is the largest
        # score so far: `total` is sum_j exp(s_j - m), and `read` is sum_j exp(s_j - m) v_j.
        # An example with 2 in place of e, two chunks, s = 1 1 | 2 2 and v = 6 0 | 3 6:
        #     chunk 1: m = 1, total = 1 + 1 = 2, read = 6 + 0 = 6
        #     chunk 2: m = 2, so both are halved: total = 1 + 1 + 1 = 3, read = 3 + 3 + 6 = 12
        #     at the end: read / total = 12 / 3 = 4
        maximum = query.new_full((*query.shape[:-1], 1), -torch.inf)  # m
        total = torch.zeros_like(maximum)
        read = torch.zeros_like(query)
        travelling = torch.stack([key, value])
        for step in range(world_size):
            theirs = positions[(rank - step) % world_size]  # whose keys and values are here now
            rows, columns = visible(mine, theirs)
            if columns.stop > 0:  # otherwise all their tokens come after mine
                keys, values = travelling[..., columns, :]
                scores = scores_of(query[..., rows, :], keys, mine[rows], theirs[columns])
                # These three are views, so a change in them changes the tensors above.
                m = maximum[..., rows, :]
                total_of_rows = total[..., rows, :]
                read_of_rows = read[..., rows, :]
                # NEW: if this chunk has a larger score M, each earlier term exp(s_j - m) must
                # become exp(s_j - M). So both sums are multiplied by exp(m - M).
                larger = torch.maximum(m, scores.amax(dim=-1, keepdim=True))  # M
                correction = (m - larger).exp()  # 0 in the first step, in which m is -inf
                weights = (scores - larger).exp()
                total_of_rows *= correction
                total_of_rows += weights.sum(dim=-1, keepdim=True)
                read_of_rows *= correction
                read_of_rows += weights @ values
                m.copy_(larger)
            if step < world_size - 1:
                travelling = pass_on(travelling, group)
        read /= total
        # NEW: no scores are kept. backward() computes them again, chunk by chunk. The last tensor
        # is L = log(sum_j exp(s_j)) = m + log(total), and exp(s_j - L) is the softmax.
        ctx.save_for_backward(query, key, value, read, maximum + total.log())
        ctx.positions = positions
        ctx.group = group
        return read

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of query, key and value, and None for positions and group."""
        query, key, value, read, log_total = ctx.saved_tensors
        rank = dist.get_rank(ctx.group)
        world_size = dist.get_world_size(ctx.group)
        mine = ctx.positions[rank]
        scale = query.shape[-1] ** -0.5
        # Below, dx is the gradient of x. That of o, do, is the argument `gradient`. L is as in
        # forward(). A query q reads o with the weights p_j = exp(s_j - L). dk_j and dv_j are sums
        # over all queries. These are the terms of one query:
        #     o = sum_j p_j v_j      gives  dp_j = do . v_j  and  dv_j = p_j do
        #     p = softmax(s)         gives  ds_j = p_j (dp_j - c)  with  c = sum_j p_j dp_j
        #     dp_j = do . v_j        gives  c = do . sum_j p_j v_j = do . o
        #     s_j = scale (q . k_j)  gives  dq = scale sum_j ds_j k_j  and  dk_j = scale ds_j q
        c = (gradient * read).sum(dim=-1, keepdim=True)  # known before any key arrives
        grad_query = torch.zeros_like(query)
        travelling = torch.stack([key, value])
        grad_travelling = torch.zeros_like(travelling)
        for step in range(world_size):
            theirs = ctx.positions[(rank - step) % world_size]
            rows, columns = visible(mine, theirs)
            keys, values = travelling[..., columns, :]
            queries = query[..., rows, :]
            grad_read = gradient[..., rows, :]  # do
            scores = scores_of(queries, keys, mine[rows], theirs[columns])
            weights = (scores - log_total[..., rows, :]).exp()  # p
            grad_scores = weights * (grad_read @ values.mT - c[..., rows, :])  # ds
            grad_query[..., rows, :] += scale * grad_scores @ keys
            grad_keys, grad_values = grad_travelling[..., columns, :]  # views, and += changes them
            # Heads that share their keys and values add up their gradients.
            grad_keys += (scale * grad_scores.mT @ queries).sum_to_size(grad_keys.shape)
            grad_values += (weights.mT @ grad_read).sum_to_size(grad_values.shape)
            if step < world_size - 1:
                travelling = pass_on(travelling, ctx.group)
            # NEW: the gradients of keys and values travel with them, and each rank adds its part.
            # After the last step they move once more, and are home.
            grad_travelling = pass_on(grad_travelling, ctx.group)
        grad_key, grad_value = grad_travelling
        return grad_query, grad_key, grad_value, None, None


def ring_attention(query, key, value, positions, group):
    """Return what this rank's tokens read, of the shape of `query`, (N, heads, tokens, size)."""
    # If two heads share their keys and values, four heads become (N, 2, 2, tokens, size), and the
    # two heads of keys and values (N, 2, 1, tokens, size). So PyTorch pairs them by broadcasting.
    query = query.unflatten(1, (key.shape[1], -1))
    read = RingAttention.apply(query, key.unsqueeze(2), value.unsqueeze(2), positions, group)
    return read.flatten(1, 2)


def attend_to_all(attention, attend, positions, group, inputs):
    """Turn this rank's tokens, (N, own tokens, width), into what they have read from all tokens."""
    query, key, value = attention.project(inputs)
    read = attend(query, key, value, positions, group)
    return attention.output(read.transpose(1, 2).flatten(2))


def split_tokens(model, attend, positions, group):
    """Let each rank compute its own tokens. All ranks keep the whole model."""
    for module in model.modules():
        if isinstance(module, Attention):
            # NEW: attention gets a different forward(). All other modules stay as they are.
            module.forward = partial(attend_to_all, module, attend, positions, group)
            # NEW: queries and keys are rotated by their true positions, and not by 0, 1, 2 ...
            module.positions = positions[dist.get_rank(group)]


def keep_own_tokens(loader, mine):
    """Leave only this rank's tokens in a loader's rows of text, and in their labels."""
    # NEW: common/data.py has shifted the labels already: each is the next byte of the text. Here it
    # would be too late, because the byte after a chunk is on another rank.
    rows = loader.dataset
    rows.images = rows.images[:, mine]
    rows.labels = rows.labels[:, mine]


def train(args):
    """Train a language model whose tokens are split, and show what each rank has of them."""
    rank, device = join(args)
    positions = ORDERS[args.order](ROW, dist.get_world_size())
    train_loader, test_loader = loaders(args)  # all ranks read the same rows
    for loader in (train_loader, test_loader):
        keep_own_tokens(loader, positions[rank])
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    split_tokens(model, ATTENTION[args.by], positions, group=None)
    # NEW: each rank has the loss of its own tokens. All have equally many, so the loss of a batch
    # is the average over the ranks, and so is its gradient, as in data parallelism.
    parallel = DistributedDataParallel(model)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, parallel, optimizer, train_loader, test_loader, device, args)
    show_tokens(model, positions, train_loader, device, args)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del parallel
    dist.destroy_process_group()


# ---------- Ulysses: inside attention, the ranks split the heads, and not the tokens ----------


class Exchange(torch.autograd.Function):
    """An all_to_all with a gradient: part i of a stack goes to rank i."""

    @staticmethod
    def forward(ctx, parts, group):
        """Return what arrives, part i from rank i."""
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx, gradient):
        """Send the gradient of each part back to its rank, which is the same exchange."""
        return Exchange.apply(gradient.contiguous(), ctx.group), None


def to_heads(tensor, positions, group):
    """Turn (N, all heads, own tokens, size) into (N, own heads, all tokens, size)."""
    parts = torch.stack(tensor.chunk(dist.get_world_size(group), dim=1)).contiguous()
    tokens = torch.cat(list(Exchange.apply(parts, group)), dim=2)
    return tokens[:, :, torch.cat(positions).argsort()]  # by position, as is_causal=True needs


def to_tokens(tensor, positions, group):
    """Turn (N, own heads, all tokens, size) into (N, all heads, own tokens, size)."""
    parts = torch.stack([tensor[:, :, theirs] for theirs in positions]).contiguous()
    return torch.cat(list(Exchange.apply(parts, group)), dim=1)


def ulysses_attention(query, key, value, positions, group):
    """Return the same as ring_attention, by all_to_alls (https://arxiv.org/abs/2309.14509)."""
    # NEW: a rank gets all tokens of its heads. A head needs no other head, so PyTorch's attention
    # can compute it.
    query = to_heads(query, positions, group)
    key = to_heads(key, positions, group)
    value = to_heads(value, positions, group)
    read = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return to_tokens(read, positions, group)


ATTENTION = {"ring": ring_attention, "ulysses": ulysses_attention}


# You can stop here: what follows only prints, and reads the flags.
def show_tokens(model, positions, loader, device, args):
    """Print how many tokens and scores each rank has, and what autograd keeps for backward()."""
    rank = dist.get_rank()
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
    kept = sum(storage.nbytes() for storage in storages.values())
    mine = positions[rank]
    tokens = len(mine) * len(positions)
    line = f"rank {rank} has {len(mine)} of {tokens} tokens, and keeps {kept:,} bytes"
    if args.by == "ring":
        scores = 0
        for theirs in positions:
            rows, columns = visible(mine, theirs)
            scores += len(mine[rows]) * len(theirs[columns])
        line += f"; it computes {scores:,} scores"
    lines = [None] * dist.get_world_size()
    dist.all_gather_object(lines, line)
    if rank == 0:
        print(*lines, sep="\n", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has. It trains the language model by default."""
    parser.set_defaults(model="language")
    parser.add_argument("--by", choices=ATTENTION, default="ring", help="a ring, or all_to_alls")
    parser.add_argument("--order", choices=ORDERS, default="zigzag", help="which tokens a rank has")


def check_flags(parser, args, world_size):
    """Refuse another model, and tokens or heads that the ranks cannot split."""
    if args.model != "language":
        parser.error(f"--model {args.model} reads images: use --model language")
    if ROW % (2 * world_size):
        parser.error(f"{world_size} ranks cannot split {ROW} tokens: use 2, 4 or 8 ranks")
    if args.by == "ulysses" and args.heads % (2 * world_size):  # two heads share keys and values
        parser.error(f"{world_size} ranks cannot split --heads {args.heads}: use --by ring")


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
