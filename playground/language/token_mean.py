"""The token mean: each token of a step counts equally, on whichever rank it is.

Run it (about a minute and a half on two cores):
    torchrun --standalone --nproc-per-node 2 playground/language/token_mean.py

It trains a language model on paragraphs. Then it prints for five batches how many tokens each rank
has, and how far the gradient would be off if each rank took the mean over its own. In Python 3.11:
    2 ranks, gloo, cpu
    epoch 3/3  loss 1.8920  train 49.21%  test 57.89% ...
    tokens + padding of each rank, and how far the gradient of a mean of means is off:
           2,448 + 1,648    1,697 + 2,399    13.9%
           2,570 + 1,526    2,257 + 1,839    4.9%

The loss of a batch is the sum of the losses of all its tokens, divided by their number. The usual
loop computes such a mean on each rank, and DDP or FSDP averages the gradients. With images, this is
the same mean, because all ranks have equal numbers of them. But paragraphs are unequal, and in a
mean of means, a token counts more on a rank that has few. The same happens between micro-batches
in gradient accumulation: with `--micro_batches 4`, a step has eight parts, and the gradient is off
by 18% to 36%.

There is no error, and the model still learns (`--wrong` trains it so). To be right, the ranks count
all tokens of a step before `backward()`, with an all_reduce of a single number.

Tokens are bytes here. Short paragraphs are padded to the length of the longest in a micro-batch,
and padding has the label -100, which `cross_entropy` leaves out. With `--packed`, a row takes as
many paragraphs as fit into 256 tokens, and a mask keeps attention within each of them. Neither
changes the losses, nor do `--by fsdp`, `--micro_batches 4`, or the number of ranks (with
`--double`, all twelve digits agree).

Try breaking it, in a copy beside it, with `--epochs 1`:
  1. Leave out `* dist.get_world_size()`. How large is the gradient? Why is the loss nearly right?
  2. With `--micro_batches 4`, count the tokens in the loop, for each micro-batch. What has changed?
  3. With `--packed`, leave out `keep_apart(model)`. What do a paragraph's first tokens see then?
Now repair `padded_texts.py` in `playground/museum/`.
Builds on: resnet.py
The next lesson, `four_axes.py`, splits a language model in four ways at once.
"""

import math
import os
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import documents, fetch
from common.models import make_model
from common.transformer import Attention

LONGEST = 256  # tokens of a row, at most
IGNORED = -100  # the label of padding: cross_entropy counts no loss for it


def compute_gradients(model, micro_batches, sums):
    """Compute the gradient of the mean over all tokens of a step, on all ranks.

    Adds to `sums` what run_epoch() returns.
    """
    # NEW: all tokens of the step that have a label, over all micro-batches and all ranks.
    count = sum((labels != IGNORED).sum() for _, labels in micro_batches)
    dist.all_reduce(count)
    for rows, labels in micro_batches:
        logits = model(rows)
        total = F.cross_entropy(logits, labels, reduction="sum")  # NEW: a sum, and not a mean
        # NEW: DDP and FSDP divide the sum of the ranks' gradients by the number of ranks. Here the
        # sum itself is right, because each of its terms has been divided by the tokens of all
        # ranks. So the factor undoes the division. (FSDP: or `set_gradient_divide_factor(1.0)`.)
        loss = total / count * dist.get_world_size()
        # With DDP, no_sync() would save messages here, as in resnet.py.
        loss.backward()
        count_in(sums, total, logits, labels)


def mean_of_means(model, micro_batches, sums):
    """Compute the gradient of the usual loop: the mean of the means of all micro-batches."""
    for rows, labels in micro_batches:
        logits = model(rows)
        loss = F.cross_entropy(logits, labels)  # the mean over the tokens of this micro-batch
        (loss / len(micro_batches)).backward()
        tokens = (labels != IGNORED).sum()
        count_in(sums, loss * tokens, logits, labels)


def update(model, optimizer, gradients, micro_batches, sums):
    """Make a step of the optimizer."""
    optimizer.zero_grad()
    gradients(model, micro_batches, sums)
    optimizer.step()


def train(args):
    """Train on paragraphs, and show what a mean of means would change."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    if args.packed:
        keep_apart(model)
    if args.by == "ddp":
        model = DistributedDataParallel(model)
    else:
        shard(model, args)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    gradients = mean_of_means if args.wrong else compute_gradients
    # NEW: fit_epoch() hands this function to run_epoch() in place of the optimizer.
    step = partial(update, model, optimizer, gradients)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, step, train_loader, test_loader, device, args)
    show_difference(model, optimizer, train_loader, device)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model, step  # the function refers to DDP
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def run_epoch(model, loader, device, step=None):
    """Train by calling step(micro_batches, sums) for each batch, or only test if there is none.

    Returns three sums over the tokens of all ranks: the loss, the number predicted correctly, the
    number of tokens.
    """
    model.train(step is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for micro_batches in loader:
        micro_batches = [(rows.to(device), labels.to(device)) for rows, labels in micro_batches]
        if step is not None:
            step(micro_batches, sums)
            continue
        [(rows, labels)] = micro_batches  # loaders() does not split a test batch
        with torch.no_grad():
            logits = model(rows)
            total = F.cross_entropy(logits, labels, reduction="sum")
        count_in(sums, total, logits, labels)
    dist.all_reduce(sums)
    return sums.tolist()


def count_in(sums, total, logits, labels):
    """Add a micro-batch's loss, correct predictions and tokens to the three sums."""
    sums[0] += total.detach()
    sums[1] += (logits.argmax(dim=1) == labels).sum()
    sums[2] += (labels != IGNORED).sum()


def make_rows(paragraphs, packed):
    """Return rows of tokens and their labels, both int64 (rows, tokens of the longest row).

    A token's label is the next token. A row has one paragraph, or as many as fit if `packed`.
    """
    rows = []
    labels = []
    for paragraph in paragraphs:
        tokens = paragraph[:-1]
        next_tokens = paragraph[1:]
        if packed and rows and len(rows[-1]) + len(tokens) <= LONGEST:
            rows[-1] = torch.cat([rows[-1], tokens])
            labels[-1] = torch.cat([labels[-1], next_tokens])
        else:
            rows.append(tokens)
            labels.append(next_tokens)
    # NEW: attention is causal, so no token looks at the padding, which comes last.
    rows = pad_sequence(rows, batch_first=True)
    return rows, pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def attend_within(attention, inputs):
    """Turn tokens, (N, tokens, width), into what they have read from their own paragraph."""
    query, key, value = attention.project(inputs)
    mask = attention.mask  # NEW: in place of is_causal=True
    read = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return attention.output(read.transpose(1, 2).flatten(2))


def keep_apart(model):
    """Let each token look at its own paragraph only, so that packing changes no loss.

    Rotary positions need no change: they only tell how far apart two tokens are.
    """
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for attention in attentions:
        attention.forward = partial(attend_within, attention)

    def make_mask(model, inputs):
        """Tell each block which tokens of a row see each other, bool (N, 1, tokens, tokens)."""
        (rows,) = inputs
        number = (rows == 0).cumsum(dim=1)  # of each token's paragraph, which begins with a 0
        same = number[:, :, None] == number[:, None, :]
        for attention in attentions:
            attention.mask = same.tril()[:, None]  # NEW: the same paragraph, and no later token

    model.register_forward_pre_hook(make_mask)


# You can stop here: what follows reads the paragraphs, and prints.


def loaders(args, rank, world_size):
    """Return a DataLoader of this rank's training paragraphs, and one of its test paragraphs.

    It gives lists of micro-batches, the rows and labels of make_rows().
    """
    texts = documents()
    first_test = len(texts) - len(texts) // 10
    train_set = paragraphs_of(texts[:first_test])
    test_set = paragraphs_of(texts[first_test:])
    sampler = DistributedSampler(train_set, world_size, rank, seed=args.seed, drop_last=True)
    per_rank_batch = args.batch_size // world_size
    in_parts = partial(split_batch, count=args.micro_batches, packed=args.packed)
    train_loader = DataLoader(
        train_set, per_rank_batch, sampler=sampler, drop_last=True, collate_fn=in_parts
    )
    batches = torch.arange(len(test_set)).tensor_split(math.ceil(len(test_set) / 100))
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    whole = partial(split_batch, count=1, packed=args.packed)
    test_loader = DataLoader(test_set, batch_sampler=own_batches, collate_fn=whole)
    return train_loader, test_loader


def paragraphs_of(texts):
    """Cut documents into paragraphs: int64 tensors that begin and end with a 0."""
    paragraphs = []
    for text in texts:
        for paragraph in text.split(b"\n\n"):
            for first in range(0, len(paragraph), LONGEST - 1):
                letters = paragraph[first : first + LONGEST - 1]
                paragraphs.append(torch.tensor([0, *letters, 0]))
    return paragraphs


def split_batch(paragraphs, count, packed):
    """Turn a rank's paragraphs into a list of micro-batches."""
    return [make_rows(paragraphs[number::count], packed) for number in range(count)]


def show_difference(model, optimizer, loader, device):
    """Print what each rank has of five batches, and how far a mean of means is off."""
    header = "tokens + padding of each rank, and how far the gradient of a mean of means is off:"
    table = []
    sums = torch.zeros(3, device=device)  # not printed
    for micro_batches in islice(loader, 5):
        micro_batches = [(rows.to(device), labels.to(device)) for rows, labels in micro_batches]
        found = []
        for gradients in (compute_gradients, mean_of_means):
            optimizer.zero_grad()
            gradients(model, micro_batches, sums)
            found.append(whole_gradient(model))
        right, wrong = found
        difference = (wrong - right).norm() / right.norm()
        tokens = sum((labels != IGNORED).sum().item() for _, labels in micro_batches)
        padding = sum(labels.numel() for _, labels in micro_batches) - tokens
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, f"{tokens:,} + {padding:,}")
        table.append("    ".join(["   ", *everyone, f"{difference:.1%}"]))
    if dist.get_rank() == 0:
        print(header, *table, sep="\n", flush=True)


def whole_gradient(model):
    """Return the gradient of all parameters in one row."""
    gradients = [parameter.grad for parameter in model.parameters()]
    if isinstance(gradients[0], DTensor):
        gradients = [gradient.full_tensor() for gradient in gradients]  # FSDP shards them
    return torch.cat([gradient.flatten() for gradient in gradients])


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.set_defaults(model="language", batch_size=32)
    add = parser.add_argument
    add("--by", choices=["ddp", "fsdp"], default="ddp", help="what averages the gradients")
    add("--micro_batches", type=flags.positive, default=1, help="micro-batches of a rank in a step")
    add("--packed", action="store_true", help="put several paragraphs into a row")
    add("--wrong", action="store_true", help="train with the mean of means")


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks, and models of images."""
    if args.model != "language":
        parser.error(f"--model {args.model} reads images, which need no padding: use language")
    parser.check_batch(args.batch_size, world_size)
    most = args.batch_size // world_size
    if args.micro_batches > most:
        parser.error(f"a rank has {most} paragraphs in a step: use --micro_batches {most}")
    args.unit = "paragraphs"


# ---------- Unchanged from fully_sharded_checkpoints.py ----------
# You know what follows: shard(). If you copy this lesson, copy this, too.


def shard(model, args):
    """Shard each layer, and then the whole model."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


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
