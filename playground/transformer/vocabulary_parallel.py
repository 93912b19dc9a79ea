"""Vocabulary parallelism: each rank has some of the words, from the embedding to the loss.

Run it (about a minute on two cores; with `--by dtensor`, PyTorch splits the layers and the loss):
    torchrun --standalone --nproc-per-node 2 playground/transformer/vocabulary_parallel.py

It prints the same numbers as `single_gpu.py --model language`, up to rounding (with `--double` all
twelve digits agree), and then what each rank keeps of 125,248 parameters and of a batch's scores,
which take 16,777,216 bytes in one process. With two ranks, it prints:
    rank 0 keeps 108,864 parameters, and 8,388,608 bytes of scores
    rank 1 keeps 108,864 parameters, and 8,388,608 bytes of scores

`sequence_parallel.py` splits the blocks of a transformer, but not the two layers around them, which
have a row for each word of the vocabulary. At every token, the output layer gives each word a score
(logit). Here the words are the 256 bytes. With 128,000 words, the scores of 8,192 tokens take 4.2
GB in float32, and their gradient takes as much again. (One process can compute output layer, loss
and `backward()` for some tokens at a time, and join the gradients of the layer's inputs. Then only
some scores exist.) Here the ranks split both layers by rows:
- The embedding. A rank takes zeros for the words of other ranks, and an all_reduce adds up
  what the ranks have found.
- The output layer. A rank computes the scores of its own words, and no rank ever has all scores. In
  `backward()`, an all_reduce adds up the gradient of the layer's input.

The loss does not need all scores in one place, either. A token with the scores s, whose label is
the word y, has the loss
    log(sum_j exp(s_j)) - s_y  =  log(sum_j exp(s_j - m)) - (s_y - m)    for any number m.
With the largest score as m, no exponential is too large for its dtype. So three numbers of a token
are enough: the largest score, the sum, and the label's score, which one rank has. Two all_reduces
send them in place of 256 scores, and `backward()` of the loss sends nothing.

Shards made by hand have the same name on all ranks, so `torch.distributed.checkpoint` would take
them for replicas. So `refuse_state` makes `state_dict()` raise an error. DTensors (`--by dtensor`)
know what they are shards of. To clip gradients, do as `tensor_parallel.py` says.

Try breaking it, in a copy beside it, with `--double`, and compare the losses:
  1. In SplitCrossEntropy, leave out the first all_reduce. Is the loss still right?
  2. Let `largest` be zeros instead. Why is the loss right here, and when is it not?
  3. In SplitEmbedding, leave out `* own[..., None]`. Which rows are added?
  4. In SplitOutput, leave out the line with `Message`. Which gradients are wrong?

Builds on: sequence_parallel.py
The next lesson, `ulysses.py`, splits the tokens of a long sequence, and the heads in attention.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.language import VOCABULARY
from common.models import make_model


# Here and below, `group` has the ranks that split the vocabulary. None means all ranks, as in this
# lesson. All have equally many words: pad your vocabulary to a multiple of their number, and give
# the padding the score -inf.
def own_words(words, count, group):
    """Find words, int64, among the `count` words of this rank.

    Returns two tensors: each word's position among them, or 0, and whether this rank has the word.
    A word outside the vocabulary gets the position `count`, where a lookup fails.
    """
    first = dist.get_rank(group) * count
    own = (words >= first) & (words < first + count)
    outside = (words < 0) | (words >= count * dist.get_world_size(group))
    position = torch.where(own, words - first, 0)
    return position.masked_fill(outside, count), own


class SplitEmbedding(torch.nn.Module):
    """An embedding of which each rank has the rows of some words."""

    def __init__(self, embedding, group):
        super().__init__()
        options = (embedding.padding_idx, embedding.max_norm, embedding.scale_grad_by_freq)
        if options != (None, None, False):
            raise ValueError("padding_idx, max_norm and scale_grad_by_freq would be lost")
        self.weight = keep_shard(embedding.weight, 0, group)
        self.group = group
        self.register_state_dict_pre_hook(refuse_state)

    def forward(self, words):
        """Turn words, int64 (N, tokens), into embedded tokens, (N, tokens, width)."""
        index, own = own_words(words, len(self.weight), self.group)
        # NEW: zeros for the words of other ranks. So only one term of the sum is not zero.
        terms = F.embedding(index, self.weight) * own[..., None]
        return Message.apply(terms, all_reduce, nothing, self.group)


class SplitOutput(torch.nn.Module):
    """An output layer, without a bias, of which each rank has the rows of some words."""

    def __init__(self, layer, group):
        super().__init__()
        if layer.bias is not None:
            raise ValueError("the bias would be lost")
        self.weight = keep_shard(layer.weight, 0, group)
        self.group = group
        self.register_state_dict_pre_hook(refuse_state)

    def forward(self, tokens):
        """Turn tokens, (N, tokens, width), into scores of this rank's words, (N, tokens, words)."""
        # NEW: every rank uses the tokens for its own words, so backward() adds up their gradient.
        tokens = Message.apply(tokens, nothing, all_reduce, self.group)
        return F.linear(tokens, self.weight)


class SplitCrossEntropy(torch.autograd.Function):
    """The cross entropy of scores that no rank has all of."""

    @staticmethod
    def forward(ctx, scores, labels, group):
        """Return the loss of each token, and whether its label has the largest score.

        Both are (N, tokens), and the same on all ranks. A token with the label -100 has loss 0.

        Args:
            scores: of this rank's words, (N, words, tokens), floating point. Those of all words on
                each rank would give a loss that is larger by log(n). (SplitOutput returns
                (N, tokens, words): transpose it.)
            labels: among all words, or -100, int64 (N, tokens).
            group: the ranks that have the scores of the other words.
        """
        # 16 bits round too much.
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        largest = scores.amax(dim=1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        valid = labels != -100
        index, own = own_words(torch.where(valid, labels, 0), scores.shape[1], group)
        of_label = scores.gather(1, index[:, None]).squeeze(1) - largest
        of_label = torch.where(own, of_label, 0)
        # In forward(), in place, because with many words these are the largest tensors.
        exponentials = (scores - largest[:, None]).exp_()
        # NEW: the two sums travel together. In the second, only one rank's term is not zero.
        sums = torch.stack([exponentials.sum(dim=1), of_label])
        dist.all_reduce(sums, group=group)
        total, of_label = sums
        softmax = exponentials.div_(total[:, None]).masked_fill_(~valid[:, None], 0)
        ctx.save_for_backward(softmax, index, own, valid)
        # NEW: of_label is now s_y - m on all ranks. If it is 0, no word has a larger score than the
        # label, so the prediction is correct (or a tie).
        correct = (of_label == 0) & valid
        ctx.mark_non_differentiable(correct)
        return torch.where(valid, total.log() - of_label, 0), correct

    @staticmethod
    def backward(ctx, gradient, _):
        """Return the gradient of this rank's scores. Nothing is sent."""
        if torch.is_grad_enabled():  # by create_graph=True
            raise RuntimeError("this loss has no second derivatives")
        softmax, index, own, valid = ctx.saved_tensors
        # NEW: the loss has two terms. The gradient of log(sum_j exp(s_j)) for the score s_i is
        # exp(s_i) / sum_j exp(s_j): the softmax.
        of_scores = softmax * gradient[:, None]
        # NEW: that of -s_y is -1 for the label's score, which one rank has, and 0 for all others.
        of_scores.scatter_add_(1, index[:, None], -(gradient * (own & valid))[:, None])
        return of_scores, None, None  # `labels` and `group` have no gradient


def split_vocabulary(model, group):
    """Split the two layers of a language model that know the vocabulary."""
    embedding = model.stage1[0]
    scores = model.stage2[-1]
    tied = scores.output.weight is embedding.weight
    model.stage1[0] = SplitEmbedding(embedding, group)
    scores.output = SplitOutput(scores.output, group)
    if tied:
        # NEW: both layers keep sharing one parameter. It is one shard, whose gradient is the sum of
        # both layers' gradients.
        scores.output.weight = model.stage1[0].weight


def train(args):
    """Split the two layers that know the vocabulary, train, and show what each rank keeps."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args)  # all ranks read the same rows
    # The same seed on all ranks, because each keeps a shard of the same random parameters.
    torch.manual_seed(args.seed)
    model = make_model(args)
    if args.by == "hand":
        split_vocabulary(model, group=None)
    else:
        mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))  # all ranks, in a row
        # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
        mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
        split_vocabulary_by_dtensor(model, mesh)
    model = model.to(device)
    fused = args.by == "hand"  # Adam's fused code refuses DTensors beside plain tensors
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=fused)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    show_kept(model, train_loader, device)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def split_vocabulary_by_dtensor(model, mesh):
    """Let PyTorch split the two layers."""
    embedding = model.stage1[0]
    scores = model.stage2[-1]
    tied = scores.output.weight is embedding.weight
    # NEW: an embedding's rows are split as SplitEmbedding does it, and the scores stay a DTensor.
    plan = {
        "stage1.0": RowwiseParallel(input_layouts=Replicate()),
        f"stage2.{len(model.stage2) - 1}.output": ColwiseParallel(use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    if tied:
        # NEW: parallelize_module has silently made two parameters of it, so tie them again.
        scores.output.weight = embedding.weight


def mean_loss(scores, labels):
    """Return the mean loss of all tokens, and for each, whether its label has the largest score."""
    if isinstance(scores, DTensor):
        # NEW: within loss_parallel(), cross_entropy computes the loss as SplitCrossEntropy does,
        # which is called here only to find out which labels have the largest score.
        _, correct = SplitCrossEntropy.apply(scores.detach().to_local(), labels, None)
        return F.cross_entropy(scores, labels).full_tensor(), correct
    losses, correct = SplitCrossEntropy.apply(scores, labels, None)
    return losses.sum() / (labels != -100).sum(), correct


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums: the loss, the number of tokens predicted correctly, the number of tokens.
    """
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for rows, labels in loader:
        rows = rows.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        # NEW: loss_parallel() changes cross_entropy and its backward(), for DTensors only.
        with torch.set_grad_enabled(model.training), loss_parallel():
            loss, correct = mean_loss(model(rows), labels)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        count = (labels != -100).sum()
        sums[0] += loss.detach() * count
        sums[1] += correct.sum()
        sums[2] += count
    return sums.tolist()  # all ranks have the same sums


# You can stop here: what follows prints what each rank keeps, and checks the flags.


def show_kept(model, loader, device):
    """Print how many parameters each rank keeps, and the bytes of a batch's scores."""
    batch, _ = next(iter(loader))
    with torch.no_grad():
        scores = model(batch.to(device))
    if isinstance(scores, DTensor):
        scores = scores.to_local()
    kept = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        kept += local.numel()
    row = f"rank {dist.get_rank()} keeps {kept:,} parameters, and {scores.nbytes:,} bytes of scores"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.set_defaults(model="language")
    add = parser.add_argument
    add("--tied", action="store_true", help="the output layer has the embedding's weight")
    add("--by", choices=["hand", "dtensor"], default="hand", help="this file, or PyTorch's DTensor")


def check_flags(parser, args, world_size):
    """Refuse another model, and a number of ranks that cannot split the vocabulary."""
    if args.model != "language":
        parser.error(f"--model {args.model} has no vocabulary: use --model language")
    if VOCABULARY % world_size:
        parser.error(f"{world_size} ranks cannot split {VOCABULARY} words: use 2, 4 or 8 ranks")


# ---------- Unchanged from message_gradients.py ----------
# You know what follows: Message(), nothing() and all_reduce(). If you copy this lesson, copy this,
# too.


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


def nothing(x, group):
    """Return x itself."""
    return x


def all_reduce(x, group):
    """Return the sum of all ranks' tensors."""
    total = x.clone()  # all_reduce overwrites its tensor, and autograd may need x elsewhere
    dist.all_reduce(total, group=group)
    return total


# ---------- Unchanged from head_parallel.py ----------
# You know what follows: keep_shard(), refuse_state(), join(), fit_epoch() and main(). If you copy
# this lesson, copy this, too.


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
