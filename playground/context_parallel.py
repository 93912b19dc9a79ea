"""Context parallelism: each rank computes some of the tokens of each sequence.

The activations of a long sequence may not fit into the memory of one GPU. So each rank keeps those
of its own tokens only. LayerNorm and the MLP treat each token by itself. For attention, the keys
and values of all tokens travel around a ring of ranks, and the queries stay (ring attention).

For a token, attention is the mean of values, weighted with exp(score). Here, a block is the keys
and values of one rank. Two sums grow block by block: `total` of the weights, and `read` of the
weighted values. exp() of a large score overflows, so the largest score so far is subtracted. If a
block has a larger one, both sums shrink. With two tokens in a block, and 2^score for exp(score):

    scores of a token [1 1 | 2 2]    values [6 0 | 3 6]
    block 1: maximum 1, weights [1 1], total 2, read 6
    block 2: maximum 2, so both sums are halved: total 1, read 3
             weights [1 1], total 1 + 2 = 3, read 3 + 9 = 12, and the mean is 12 / 3 = 4

Attention is causal: a token looks at itself and at those before it. With --order plain, rank 0 has
the first tokens, which look at few others, and all ranks wait for the last rank. With --order
zigzag, each rank has some early tokens and some late ones, so all compute about as much. The class
comes from the last token, so only one rank has the loss. Each rank gets the part of a gradient that
comes from its own tokens. These parts are added up over the ranks, and not averaged.

--by ulysses gives each rank all tokens of some heads by three all_to_alls, and a fourth returns the
results. It sends less than the ring, with two ranks half as much (playground/sharding.md), but the
number of ranks must divide the heads. The ring works for any number, and could hide its messages.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/context_parallel.py --compare
    torchrun --standalone --nproc-per-node 2 playground/context_parallel.py --compare --by ulysses

It prints the same numbers as single_gpu.py --model transformer. Before that, --compare prints:
    gradients differ from the whole model's by 6e-08
                tokens  pairs of tokens  kept for backward()
    rank 0      14      294              7,908,468 bytes
    rank 1      14      294              7,908,468 bytes
    one process 28      406              15,793,156 bytes
    of rank 0   counted  predicted  bytes sent  predicted
    send        8        8          3,670,016   3,670,016
    all_reduce  39       39         110,504     110,504
406 pairs are not masked. Each rank also computes masked ones. With --order plain, rank 0 computes
196 pairs, and rank 1 computes 392.

Try breaking it, in a copy, and run it with --compare:
  1. After the first all_reduce, write `parameter.grad /= dist.get_world_size()`. Is the loss wrong?
  2. Replace `loss = loss * 0` with `pass`. Is there an error? Which tokens now give the class?
  3. Write `if has_last: loss.backward()`. Which rank fails, and where does the other wait?

Now write ring_attention.py in playground/exercises/, and repair fault_many_times_the_gradient.py.

The next lesson, expert_parallel.py, gives each rank different parameters, and sends tokens to them.
"""

import copy
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import HEADS, TOKENS, make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.sequences import compare_sequence


def plain(tokens, world_size):
    """Return the places of each rank's tokens: one part of the sequence after another."""
    return list(torch.arange(tokens).tensor_split(world_size))


def zigzag(tokens, world_size):
    """Return the places of each rank's tokens: a chunk near the start, and one near the end."""
    # With two ranks and the chunks 0, 1, 2 and 3, rank 0 has 0 and 3, and rank 1 has 1 and 2.
    chunks = torch.arange(tokens).tensor_split(2 * world_size)
    places = []
    for rank in range(world_size):
        # NEW: early tokens look at few others, and late ones at many. With some of both, all ranks
        # compute about as much.
        places.append(torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]]))
    return places


def visible(mine, theirs):
    """Return which of my tokens look at any of theirs, and which of theirs are looked at."""
    # NEW: rows of queries before their first token, and columns of keys after my last one, would
    # be masked entirely. So they are not computed. With zigzag, each rank has a late token, so it
    # would otherwise compute all pairs. Places are in ascending order, so both are slices. They may
    # be empty.
    first = int((mine < theirs[0]).sum())
    end = int((theirs <= mine[-1]).sum())
    return slice(first, None), slice(0, end)


def scores_of(query, key, query_places, key_places):
    """Return how much each token looks at each other one: -inf if that one comes later."""
    scores = query @ key.mT * query.shape[-1] ** -0.5  # the scale that PyTorch's attention has
    later = key_places.to(scores.device) > query_places.to(scores.device)[:, None]
    return scores.masked_fill(later, -torch.inf)


def pass_on(tensor, tokens, group):
    """Send `tensor` to the next rank, and return the previous one's, which has `tokens` tokens."""
    rank = dist.get_rank(group)
    world_size = dist.get_world_size(group)
    following = (rank + 1) % world_size
    previous = (rank - 1) % world_size
    if following == rank:
        return tensor  # a single rank has no neighbour
    received = tensor.new_empty(*tensor.shape[:-2], tokens, tensor.shape[-1])
    send = dist.P2POp(dist.isend, tensor, group=group, group_peer=following)
    receive = dist.P2POp(dist.irecv, received, group=group, group_peer=previous)
    for request in dist.batch_isend_irecv([send, receive]):
        request.wait()  # a faster ring would compute a block while the next one travels
    return received


# PyTorch's own context parallelism is experimental, and does not run on CPUs. So this is by hand.
# query, key and value are those of this rank's tokens, (N, heads, tokens, size). places[r] has the
# places of rank r's tokens in the sequence, in ascending order. Ranks may have different numbers of
# tokens, but each has at least one. `group` has the ranks that share the sequence. (In bfloat16,
# keep `maximum`, `total` and `read` in float32, because sums over many tokens lose digits.)
class RingAttention(torch.autograd.Function):
    """Causal attention of this rank's tokens to all others (https://arxiv.org/abs/2310.01889)."""

    @staticmethod
    def forward(ctx, query, key, value, places, group):
        """Return what this rank's tokens have read, of the shape of `query`."""
        rank = dist.get_rank(group)
        world_size = dist.get_world_size(group)
        mine = places[rank]
        maximum = query.new_full((*query.shape[:-1], 1), -torch.inf)
        total = torch.zeros_like(maximum)
        read = torch.zeros_like(query)
        travelling = torch.stack([key, value])
        for step in range(world_size):
            theirs = places[(rank - step) % world_size]  # whose keys and values are here now
            # If all of their tokens come later than all of mine, there is nothing to compute.
            if theirs[0] <= mine[-1]:
                rows, columns = visible(mine, theirs)
                keys, values = travelling[..., columns, :]
                scores = scores_of(query[..., rows, :], keys, mine[rows], theirs[columns])
                # These are views. They are changed in place.
                so_far = maximum[..., rows, :]
                total_of_rows = total[..., rows, :]
                read_of_rows = read[..., rows, :]
                # NEW: exp() of a large score would overflow, so the largest score so far is
                # subtracted first. If this block has a larger one, the sums shrink accordingly.
                # In the first step each token looks at itself, so no maximum stays at
                # -inf (-inf minus -inf would be nan).
                larger = torch.maximum(so_far, scores.amax(dim=-1, keepdim=True))
                shrink = (so_far - larger).exp()
                weights = (scores - larger).exp()
                total_of_rows.mul_(shrink).add_(weights.sum(dim=-1, keepdim=True))
                read_of_rows.mul_(shrink).add_(weights @ values)
                so_far.copy_(larger)
            if step < world_size - 1:
                arriving = places[(rank - step - 1) % world_size]  # whose keys and values come next
                travelling = pass_on(travelling, len(arriving), group)
        read /= total
        # NEW: no scores are kept. backward() computes them again from these, block by block. The
        # last tensor is the log of the sum of all exp(score).
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
        # of_x means the gradient of x. `gradient` is that of `read`, and of_read, below, has some
        # of its rows. `weights` is a softmax, so the gradient of its inputs is weights *
        # (of_weights - common). Here of_weights is of_read @ values.mT, and `common` is the mean of
        # of_weights over all keys, weighted with `weights`. `read` is the same mean of the values,
        # so for each token `common` is the dot product of `gradient` and `read`.
        common = (gradient * read).sum(dim=-1, keepdim=True)
        of_query = torch.zeros_like(query)
        travelling = torch.stack([key, value])
        of_travelling = torch.zeros_like(travelling)
        for step in range(world_size):
            theirs = places[(rank - step) % world_size]
            rows, columns = visible(mine, theirs)
            keys, values = travelling[..., columns, :]
            queries = query[..., rows, :]
            scores = scores_of(queries, keys, mine[rows], theirs[columns])
            # NEW: exp(log_total) is the sum of exp(score) over all keys. So these weights add up to
            # 1, but those in forward() do not: there, `read` is divided by the sum at the end.
            weights = (scores - log_total[..., rows, :]).exp()
            of_read = gradient[..., rows, :]
            # The gradient of query @ key.mT, which scores_of() multiplies by the same scale.
            of_products = weights * (of_read @ values.mT - common[..., rows, :]) * scale
            of_query[..., rows, :] += of_products @ keys
            # Views, so += changes what travels.
            of_keys, of_values = of_travelling[..., columns, :]
            of_keys += of_products.mT @ queries
            of_values += weights.mT @ of_read
            arriving = places[(rank - step - 1) % world_size]
            if step < world_size - 1:
                travelling = pass_on(travelling, len(arriving), group)
            # NEW: the gradients of keys and values travel with them, and each rank adds its part.
            # After the last step they move once more, and are home.
            of_travelling = pass_on(of_travelling, len(arriving), group)
        of_key, of_value = of_travelling
        return of_query, of_key, of_value, None, None


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
    # NEW: a head needs no other head, so with all tokens this is the attention of a single process.
    query = Travel.apply(query, to_heads, to_tokens, places, group)
    key = Travel.apply(key, to_heads, to_tokens, places, group)
    value = Travel.apply(value, to_heads, to_tokens, places, group)
    read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return Travel.apply(read, to_tokens, to_heads, places, group)


ORDERS = {"plain": plain, "zigzag": zigzag}
ATTENTION = {"ring": RingAttention.apply, "ulysses": ulysses_attention}


def embed_own_tokens(embedding, mine, images):
    """Turn images, (N, 1, 28, 28), into embedded tokens, (N, tokens of this rank, width)."""
    pieces = images.flatten(1).unflatten(1, (embedding.tokens, -1))
    return embedding.embed(pieces[:, mine]) + embedding.position[mine]


def attend_to_all(attention, attend, places, group, inputs):
    """Turn this rank's tokens, (N, tokens, width), into what they have read from all tokens."""
    query = attention.split_heads(attention.query(inputs))
    key = attention.split_heads(attention.key(inputs))
    value = attention.split_heads(attention.value(inputs))
    read = attend(query, key, value, places, group)
    return attention.output(read.transpose(1, 2).flatten(2))


def split_tokens(model, attend, places, group):
    """Let each rank compute its own tokens. All ranks keep the whole model.

    The model and its modules must be those of common/models.py, whose parts the two functions above
    use.
    """
    # NEW: two kinds of modules get a different forward(), and keep their parameters. LayerNorm and
    # the MLP stay as they are, because they treat each token by itself.
    embedding = model.stage1[0]
    mine = places[dist.get_rank(group)]
    embedding.forward = partial(embed_own_tokens, embedding, mine)
    for layer in (*model.stage1, *model.stage2):
        if hasattr(layer, "attention"):
            attention = layer.attention
            attention.forward = partial(attend_to_all, attention, attend, places, group)


def compute_gradients(model, images, labels, has_last):
    """Compute the gradients of a batch of images. Returns the logits of this rank's last token."""
    logits = model(images)
    loss = F.cross_entropy(logits, labels)
    if not has_last:
        # NEW: the class is read from the last token of the sequence, which is on one rank. The
        # losses of the others count 0 times. They still call backward(), because it sends keys,
        # values and their gradients around the ring. (If every token has a loss, as in a language
        # model, all of them count: divide their sum on each rank by the number of all tokens.)
        loss = loss * 0
    loss.backward()
    for parameter in model.parameters():
        # NEW: each rank has the part of the gradient that comes from its own tokens. The parts are
        # added up, and not divided by n: the mean over the images is in the loss already. (One
        # long message would be faster: see --bucket of manual_data_parallel.py.)
        dist.all_reduce(parameter.grad)
    return logits.detach()


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


def run_epoch(model, loader, device, has_last, optimizer=None):
    """Train, or only test if there is no optimizer. Returns the sums of the rank with the loss."""
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if optimizer is not None:
            optimizer.zero_grad()
            logits = compute_gradients(model, images, labels, has_last)
            optimizer.step()
        else:
            with torch.no_grad():
                logits = model(images)
        if has_last:  # NEW: the logits of the other ranks are from earlier tokens
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += len(labels)
    dist.all_reduce(sums)  # NEW: from the rank with the last token to all ranks
    return sums.tolist()


def train(args):
    """Compare a step with that of the whole model, if asked. Then train, and print the epochs."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    train_loader, test_loader = loaders(args)  # NEW: all ranks read the same images
    places = ORDERS[args.order](args.tokens, dist.get_world_size())
    last_places = [mine[-1].item() for mine in places]
    has_last = last_places[rank] == max(last_places)
    torch.manual_seed(args.seed)  # equal on all ranks, because each keeps what it draws
    whole_model = make_model(args)
    model = copy.deepcopy(whole_model).to(device)
    # NEW: the group of the ranks that share a sequence. Here they are all ranks.
    split_tokens(model, ATTENTION[args.by], places, dist.group.WORLD)
    if args.compare:
        step = partial(compute_gradients, model, has_last=has_last)
        compare_sequence(step, model, whole_model, next(iter(train_loader)), places, args.by)
    torch.manual_seed(args.seed + rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, has_last, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device, has_last)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    parser.set_defaults(model="transformer")
    add = parser.add_argument
    add("--by", choices=ATTENTION, default="ring", help="ring attention, or all_to_alls")
    add("--order", choices=ORDERS, default="zigzag", help="which tokens a rank has")
    add("--compare", action="store_true", help="first count a step, and compare it")
    args = parser.parse_args()
    check(parser, args, replicas=1)  # guard rail: refuses impossible flags
    if args.model != "transformer":
        parser.error(f"--model {args.model} has no tokens: use --model transformer")
    world_size = int(os.environ["WORLD_SIZE"])
    args.tokens = args.tokens or TOKENS
    if args.tokens < world_size:
        parser.error(f"--tokens {args.tokens}: {world_size} processes need at least {world_size}")
    args.heads = args.heads or HEADS
    if args.by == "ulysses" and args.heads % world_size:
        wrong = f"--heads {args.heads}: {world_size} processes cannot split them"
        parser.error(f"{wrong}: use --by ring")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
