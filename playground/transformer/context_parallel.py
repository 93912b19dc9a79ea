"""Context parallelism: each rank computes some of the tokens of each sequence.

Run it, with attention by a ring, and then by all_to_alls:
    torchrun --standalone --nproc-per-node 2 playground/transformer/context_parallel.py
    torchrun --standalone --nproc-per-node 2 playground/transformer/context_parallel.py --by ulysses

It prints the same numbers as `single_gpu.py --model transformer`, up to rounding (with --double all
twelve digits agree), and then how many tokens each rank has, and how many bytes it keeps for
backward(). With the first command:
    rank 0 has 14 of 28 tokens, and keeps 7,902,320 bytes; it computes 294 pairs
    rank 1 has 14 of 28 tokens, and keeps 7,902,320 bytes; it computes 294 pairs

The activations of a long sequence may not fit on one GPU. So each rank has all parameters, but only
its own tokens. LayerNorm and the MLPs treat each token by itself. For attention, the keys and
values of all tokens travel around a ring of ranks, while the queries stay.

Attention is causal, so a token looks only at itself and at those before it, which makes 406 pairs
of tokens. A rank computes rectangles of pairs, and masks some of them. With --order plain, rank 0
has the first half of the tokens, computes 196 pairs, and waits for rank 1, which computes 392. With
--order zigzag, the default, each has some early tokens and some late ones.

With --by ulysses, three all_to_alls give each rank all tokens of some heads, and a fourth sends the
results back. It sends less than the ring, with two ranks half as much, but the number of
ranks must divide the heads. The ring works for any number, and could compute while it sends.

Try breaking it, in a copy beside it, with --double, and compare the losses:
  1. In add_up_gradients, return `total / dist.get_world_size()`. Why does Adam hardly notice?
  2. In FromOwner, leave out the two lines that replace the gradient with zeros. Is there an error?
  3. Leave out `total_of_rows *= correction`. When would this be no fault?
  4. In from_owner, write `if dist.get_rank() != owner:` and below it `logits = logits.detach()`.
     Which rank fails, and where does the other wait?
Now write `ring_attention.py`, and repair `fault_many_times_the_gradient.py`, both in
playground/exercises/.
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
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import ROW, fetch, loaders
from common.models import make_model
from common.transformer import Attention, Tokens


# Here and below, places[r] has the places of rank r's tokens in the sequence, in ascending order.
# `group` has the ranks that split a sequence. None means all ranks, as in this lesson. (If a model
# kept the group itself, Python might abort at exit.)
def plain(tokens, world_size):
    """Return the places of each rank's tokens: one part of the sequence after another."""
    return list(torch.arange(tokens).tensor_split(world_size))


def zigzag(tokens, world_size):
    """Return the places of each rank's tokens: a chunk near the start, and one near the end."""
    # NEW: early tokens look at few others, and late ones at many. With two ranks and the chunks
    # 0, 1, 2 and 3, rank 0 has 0 and 3, rank 1 has 1 and 2, and both compute about as much.
    chunks = torch.arange(tokens).tensor_split(2 * world_size)
    pairs = zip(chunks[:world_size], reversed(chunks[world_size:]), strict=True)
    return [torch.cat(pair) for pair in pairs]


ORDERS = {"plain": plain, "zigzag": zigzag}


def scores_of(query, key, query_places, key_places):
    """Return how much each query looks at each key: -inf if the key's token comes later."""
    scores = query @ key.mT * query.shape[-1] ** -0.5  # the scale that PyTorch's attention has
    later = key_places.to(scores.device) > query_places.to(scores.device)[:, None]
    return scores.masked_fill(later, -torch.inf)


def visible(mine, theirs):
    """Return two slices: my tokens that look at any of theirs, and theirs that are looked at.

    The other pairs are masked, so they are not computed. Either slice may be empty.
    """
    first = int((mine < theirs[0]).sum())
    end = int((theirs <= mine[-1]).sum())
    return slice(first, None), slice(0, end)


def pass_on(tensor, tokens, group):
    """Send `tensor` to the next rank, and return the previous one's, which has `tokens` tokens."""
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return tensor
    received = tensor.new_empty(*tensor.shape[:-2], tokens, tensor.shape[-1])
    following = (rank + 1) % world_size
    previous = (rank - 1) % world_size
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=following)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=previous)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()  # a faster ring would compute a chunk while the next one travels
    return received


# PyTorch's own context parallelism is experimental, and does not run on CPUs. So this is by hand.
class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's tokens to all tokens (https://arxiv.org/abs/2310.01889).

    query, key and value are those of this rank's tokens, (N, heads, own tokens, size). A chunk is
    the keys and values of one rank. All chunks travel around a ring, and the queries stay.
    """

    @staticmethod
    def forward(ctx, query, key, value, places, group):
        """Return what this rank's tokens have read, of the shape of `query`."""
        rank = dist.get_rank(group)
        world_size = dist.get_world_size(group)
        mine = places[rank]
        # A token with the scores s_j reads  sum_j exp(s_j) v_j / sum_j exp(s_j),  and exp() of a
        # large score overflows. So both sums are kept divided by exp(m), where m is the largest
        # score so far: `total` is sum_j exp(s_j - m), and `read` is sum_j exp(s_j - m) v_j.
        # An example with 2 in place of e, two chunks, s = 1 1 | 2 2 and v = 6 0 | 3 6:
        #     chunk 1: m = 1, total = 1 + 1 = 2, read = 6 + 0 = 6
        #     chunk 2: m = 2, so both are halved: total = 1 + 1 + 1 = 3, read = 3 + 3 + 6 = 12
        #     at the end: read / total = 12 / 3 = 4
        # (With queries in bfloat16, keep all three in float32.)
        maximum = query.new_full((*query.shape[:-1], 1), -torch.inf)  # m
        total = torch.zeros_like(maximum)
        read = torch.zeros_like(query)
        travelling = torch.stack([key, value])
        for step in range(world_size):
            theirs = places[(rank - step) % world_size]  # whose keys and values are here now
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
                arriving = places[(rank - step - 1) % world_size]
                travelling = pass_on(travelling, len(arriving), group)
        read /= total
        # NEW: no scores are kept. backward() computes them again, chunk by chunk. The last tensor
        # is L = log(sum_j exp(s_j)) = m + log(total), and exp(s_j - L) is the softmax.
        ctx.save_for_backward(query, key, value, read, maximum + total.log())
        ctx.places = places
        ctx.group = group
        return read

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradients of query, key and value, and None for places and group."""
        query, key, value, read, log_total = ctx.saved_tensors
        places = ctx.places
        group = ctx.group
        rank = dist.get_rank(group)
        world_size = dist.get_world_size(group)
        mine = places[rank]
        scale = query.shape[-1] ** -0.5
        # Below, dx is the gradient of x; that of o, `do`, is `gradient`; L is that of forward(). A
        # query q reads o with the weights p_j = exp(s_j - L). dk_j and dv_j are sums over all
        # queries. These are the terms of one query:
        #     o = sum_j p_j v_j      gives  dp_j = do . v_j  and  dv_j = p_j do
        #     p = softmax(s)         gives  ds_j = p_j (dp_j - c)  with  c = sum_j p_j dp_j
        #     dp_j = do . v_j        gives  c = do . sum_j p_j v_j = do . o
        #     s_j = scale (q . k_j)  gives  dq = scale sum_j ds_j k_j  and  dk_j = scale ds_j q
        c = (gradient * read).sum(dim=-1, keepdim=True)  # known before any key arrives
        grad_query = torch.zeros_like(query)
        travelling = torch.stack([key, value])
        grad_travelling = torch.zeros_like(travelling)
        for step in range(world_size):
            theirs = places[(rank - step) % world_size]
            rows, columns = visible(mine, theirs)
            keys, values = travelling[..., columns, :]
            queries = query[..., rows, :]
            grad_read = gradient[..., rows, :]  # do
            scores = scores_of(queries, keys, mine[rows], theirs[columns])
            weights = (scores - log_total[..., rows, :]).exp()  # p
            grad_scores = weights * (grad_read @ values.mT - c[..., rows, :])  # ds
            grad_query[..., rows, :] += scale * grad_scores @ keys
            grad_keys, grad_values = grad_travelling[..., columns, :]  # views, and += changes them
            # NEW: if heads share their keys and values, those get the sum over the heads.
            grad_keys += (scale * grad_scores.mT @ queries).sum_to_size(grad_keys.shape)
            grad_values += (weights.mT @ grad_read).sum_to_size(grad_values.shape)
            arriving = places[(rank - step - 1) % world_size]
            if step < world_size - 1:
                travelling = pass_on(travelling, len(arriving), group)
            # NEW: the gradients of keys and values travel with them, and each rank adds its part.
            # After the last step they move once more, and are home.
            grad_travelling = pass_on(grad_travelling, len(arriving), group)
        grad_key, grad_value = grad_travelling
        return grad_query, grad_key, grad_value, None, None


def ring_attention(query, key, value, places, group):
    """Return what RingAttention reads. Heads that share keys and values are a dimension of it."""
    query = query.unflatten(1, (key.shape[1], -1))
    read = RingAttention.apply(query, key.unsqueeze(2), value.unsqueeze(2), places, group)
    return read.flatten(1, 2)


def exchange(parts, shapes, group):
    """Send parts[i] to rank i. Return what arrives: from rank i, a tensor of shape shapes[i]."""
    sent = torch.cat([part.flatten() for part in parts])
    send_sizes = [part.numel() for part in parts]
    receive_sizes = [torch.Size(shape).numel() for shape in shapes]
    received = sent.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, sent, receive_sizes, send_sizes, group=group)
    chunks = received.split(receive_sizes)
    return [chunk.view(shape) for chunk, shape in zip(chunks, shapes, strict=True)]


def to_heads(tensor, places, group):
    """Turn (N, all heads, own tokens, size) into (N, own heads, all tokens, size)."""
    world_size = dist.get_world_size(group)
    images, heads, _, size = tensor.shape
    shapes = [(images, heads // world_size, len(theirs), size) for theirs in places]
    received = torch.cat(exchange(tensor.chunk(world_size, dim=1), shapes, group), dim=2)
    in_order = torch.empty_like(received)
    in_order[:, :, torch.cat(places)] = received  # each token at its place, as is_causal=True needs
    return in_order


def to_tokens(tensor, places, group):
    """Turn (N, own heads, all tokens, size) into (N, all heads, own tokens, size)."""
    images, heads, _, size = tensor.shape
    mine = places[dist.get_rank(group)]
    shapes = [(images, heads, len(mine), size)] * len(places)
    parts = [tensor[:, :, theirs] for theirs in places]
    return torch.cat(exchange(parts, shapes, group), dim=1)


class Travel(torch.autograd.Function):
    """to_heads or to_tokens, with a backward(), because all_to_all_single has no gradient."""

    @staticmethod
    def forward(ctx, tensor, there, back, places, group):
        """Return there(tensor, places, group)."""
        ctx.back = partial(back, places=places, group=group)
        return there(tensor, places, group)

    @staticmethod
    def backward(ctx, gradient):
        """Let the gradient travel back."""
        return ctx.back(gradient), None, None, None, None


def ulysses_attention(query, key, value, places, group):
    """Return the same as RingAttention, by all_to_alls (https://arxiv.org/abs/2309.14509)."""
    # NEW: a rank gets all tokens of its heads. A head needs no other head, so PyTorch's attention
    # can compute it.
    query = Travel.apply(query, to_heads, to_tokens, places, group)
    key = Travel.apply(key, to_heads, to_tokens, places, group)
    value = Travel.apply(value, to_heads, to_tokens, places, group)
    read = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return Travel.apply(read, to_tokens, to_heads, places, group)


ATTENTION = {"ring": ring_attention, "ulysses": ulysses_attention}


def embed_own_tokens(embedding, mine, images):
    """Turn images, (N, 1, 28, 28), into embedded tokens, (N, own tokens, width)."""
    pieces = images.flatten(1).unflatten(1, (embedding.tokens, -1))
    return embedding.embed(pieces[:, mine]) + embedding.position[mine]


def embed_own_bytes(embedding, mine, rows):
    """Turn rows of a text, int64 (N, tokens), into embedded tokens, (N, own tokens, width)."""
    return F.embedding(rows[:, mine], embedding.weight)


def attend_to_all(attention, attend, places, group, inputs):
    """Turn this rank's tokens, (N, own tokens, width), into what they have read from all tokens."""
    query, key, value = attention.project(inputs)
    read = attend(query, key, value, places, group)
    return attention.output(read.transpose(1, 2).flatten(2))


def split_tokens(model, attend, places, group):
    """Let each rank compute its own tokens. All ranks keep the whole model."""
    mine = places[dist.get_rank(group)]
    for module in model.modules():
        # NEW: the embedding and attention get a different forward(), and keep their parameters. The
        # other modules stay as they are.
        if isinstance(module, Tokens):
            module.forward = partial(embed_own_tokens, module, mine)
        elif isinstance(module, torch.nn.Embedding):
            module.forward = partial(embed_own_bytes, module, mine)
        elif isinstance(module, Attention):
            module.forward = partial(attend_to_all, module, attend, places, group)
            module.positions = mine  # --model language rotates queries and keys by them


class FromOwner(torch.autograd.Function):
    """Give all ranks the owner's logits."""

    @staticmethod
    def forward(ctx, logits, owner, group):
        """Return the logits of the owner."""
        ctx.is_owner = dist.get_rank(group) == owner
        logits = logits.clone()
        dist.broadcast(logits, group=group, group_src=owner)
        return logits

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient on the owner, and zeros on other ranks, whose logits are not used."""
        # NEW: zeros, and not None, because the hooks of add_up_gradients() take tensors.
        if not ctx.is_owner:
            gradient = torch.zeros_like(gradient)
        return gradient, None, None


def share_logits(model, places, group):
    """Give the logits of the rank that has the sequence's last token to all ranks."""
    ends = [int(theirs[-1]) for theirs in places]
    owner = ends.index(max(ends))

    def from_owner(module, inputs, logits):
        """Replace the logits of this rank's own last token."""
        return FromOwner.apply(logits, owner, group)

    # NEW: the class is read off the last token. With the logits, all ranks compute the same loss.
    model.register_forward_hook(from_owner)


def gather_logits(model, places, group):
    """Give all ranks the logits of all tokens: a language model has a loss at each of them."""
    rank = dist.get_rank(group)
    in_order = torch.cat(places).argsort()

    def from_all(module, inputs, logits):
        """Turn this rank's logits, (N, 256, own tokens), into those of all, (N, 256, tokens)."""
        shapes = [(*logits.shape[:2], len(theirs)) for theirs in places]
        chunks = exchange([logits.detach()] * len(places), shapes, group)
        # NEW: only this rank's own logits are connected to autograd, as in sequence_parallel.py.
        chunks[rank] = logits
        return torch.cat(chunks, dim=2)[..., in_order]

    model.register_forward_hook(from_all)


def add_up_gradients(model, group):
    """Add up the gradients of the ranks. Each has the part that comes from its own tokens."""

    def add_up(gradient):
        """Return the sum of the parts of all ranks."""
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        # NEW: the sum, and not its mean. All ranks have one loss, and each a part of its gradient.
        return total

    # A gradient is added up before it is added to .grad. So batches can be accumulated, too.
    for parameter in model.parameters():
        parameter.register_hook(add_up)


def train(args):
    """Train a transformer whose tokens are split, and show what each rank has of them."""
    rank, device = join(args)
    # NEW: all ranks read the same images, so run_epoch() counts each image once for every rank.
    # This changes neither the mean loss nor the percentages.
    train_loader, test_loader = loaders(args)
    torch.manual_seed(args.seed)  # the same seed on all ranks, because each keeps the whole model
    model = make_model(args).to(device)
    places = ORDERS[args.order](tokens_of(args), dist.get_world_size())
    group = None  # all ranks
    split_tokens(model, ATTENTION[args.by], places, group)
    if args.model == "language":
        gather_logits(model, places, group)
    else:
        share_logits(model, places, group)
    add_up_gradients(model, group)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    fit(model, optimizer, train_loader, test_loader, device, args)
    show_tokens(model, places, train_loader, device, args)
    dist.destroy_process_group()


def tokens_of(args):
    """Return how many tokens a sequence has: an image, or a row of the text."""
    return ROW if args.model == "language" else args.tokens


def show_tokens(model, places, loader, device, args):
    """Print how many tokens and pairs each rank has, and what autograd keeps for backward()."""
    rank = dist.get_rank()
    storages = {}  # the memory behind tensors, by its address: what shares memory counts once

    def note(tensor):
        """Note a tensor that autograd keeps."""
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    images, _ = next(iter(loader))
    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(images.to(device))
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    kept = sum(storage.nbytes() for storage in storages.values())
    tokens = sum(len(theirs) for theirs in places)
    mine = places[rank]
    row = f"rank {rank} has {len(mine)} of {tokens} tokens, and keeps {kept:,} bytes"
    if args.by == "ring":
        pairs = 0
        for theirs in places:
            rows, columns = visible(mine, theirs)
            pairs += len(mine[rows]) * len(theirs[columns])
        row += f"; it computes {pairs:,} pairs"
    table = [None] * dist.get_world_size()
    dist.all_gather_object(table, row)
    if rank == 0:
        print(*table, sep="\n", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.set_defaults(model="transformer")
    parser.add_argument("--by", choices=ATTENTION, default="ring", help="a ring, or all_to_alls")
    parser.add_argument("--order", choices=ORDERS, default="zigzag", help="which tokens a rank has")


def check_flags(parser, args, world_size):
    """Refuse a model that the ranks cannot split. The batch is never split."""
    if args.model in ("mlp", "cnn"):
        parser.error(f"--model {args.model} has no tokens: use --model transformer")
    tokens = tokens_of(args)
    if tokens < world_size:
        parser.error(f"{world_size} ranks cannot split {tokens} tokens: use more tokens")
    heads = args.heads
    # In a language model, two heads share their keys and values.
    unit = 2 * world_size if args.model == "language" else world_size
    if args.by == "ulysses" and heads % unit:
        parser.error(f"{world_size} ranks cannot split --heads {heads}: use --by ring")


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), fit(), run_epoch() and main(). If you copy this lesson, copy it,
# too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device = torch.device(args.device)
    gpu = None
    if args.device != "cpu":
        gpu = device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    # The address, the rank and the world size are in the environment.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


def fit(model, optimizer, train_loader, test_loader, device, args):
    """Train and test, and print one line for each epoch."""
    rank = dist.get_rank()
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
        start = time.perf_counter()
        # Only rank 0 shows a bar, and only in a terminal.
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)
        loss, correct, images = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        speed = len(train_loader) * args.batch_size / seconds
        # A wrapper such as DDP may send messages in forward(), so test the model that it wraps.
        plain = getattr(model, "module", model)
        _, test_correct, test_images = run_epoch(plain, test_loader, device)
        if rank == 0:
            digits = 12 if args.double else 4
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss / images:.{digits}f}"
                f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
                f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
                flush=True,
            )


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test without optimizer. Returns sums over all ranks: loss, correct, images."""
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
    # There is no group yet, so a download may take long. One process of each node does it.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
