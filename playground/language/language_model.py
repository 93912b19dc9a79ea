r"""A language model, trained as large ones are: FSDP, bfloat16, accumulation, clipping, MFU.

Run it in float32 (one or two minutes on two cores), and in bfloat16, as on GPUs (about seven):
    torchrun --standalone --nproc-per-node 2 playground/language/language_model.py --precision full
    torchrun --standalone --nproc-per-node 2 playground/language/language_model.py

It prints for each epoch (here the first command, with the text of Python 3.11):
    epoch 5/5  loss 1.2518  train 64.26%  test 66.70% ...
This is followed by what the model writes then, byte by byte:
    | The same inGroupI which the ordering only stes an "__self.x
    |    "__getitem_narg?" for a descarits well sault is in the

It learns from help texts of Python. Its tokens are bytes, and at each token it predicts the next
one. Most parts of its training have had a lesson of their own: layers are sharded and compute in
bfloat16, blocks keep only their input (`--checkpoint`), gradients are clipped. `prepare` puts the
first three together. With `--run_dir`, each epoch ends with a sharded checkpoint (none is deleted),
and the same command resumes from the newest one. These parts are new:
- A step of a large model takes millions of tokens. So each rank computes `--rows` rows at a time, a
  micro-batch, and adds up their gradients.
- The learning rate rises in the first steps, while Adam's averages are still rough, and then falls.
- With `--weight_decay 0.1`, a usual value, each step also shrinks the matrices (by default: 0).
  Vectors, such as those of the norms, do not decay.
- The perplexity is exp(test loss), 3.43 at the end: the model is as uncertain as if it had to
  choose among 3.43 bytes at random.
- Tokens per second (the throughput) depend on the model and the machine. The model FLOPs
  utilization (MFU) can be compared between them: the operations that the model needs, divided by
  those that the GPU can do in this time (`--peak`, its data sheet's number without sparsity).

With `--double --constant --clip 0 --lr 1e-3`, all twelve digits are those of `single_gpu.py` with
`--double --model language --batch_size 32 --epochs 5`.

Try breaking it, in a copy beside it:
  1. Call `sample()` on rank 0 only. Where does each rank wait?
  2. With `--tied`, also shard the embedding: `fully_shard(model.stage1[0], mesh=mesh)`, before the
     last line of `prepare`. What does PyTorch say?
  3. Divide by `micro_labels.numel()`. The printed loss is twice as large, but the accuracies are
     nearly the same. Why?
  4. Before the loop in `update`, call `model.set_requires_gradient_sync(False)`. What is learned?
     Then call it with True before the last micro-batch. What has this saved, and at what cost?

Builds on: activation_checkpointing.py
The next lesson, `token_mean.py`, divides the loss by the tokens of all ranks.
"""

import math
import os
import re
import sys
import textwrap
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import ROW, fetch, loaders
from common.models import make_model
from common.transformer import Attention, Block

DTYPES = {"bfloat16": torch.bfloat16, "full": None}  # None: as it is
# The numbers depend on these flags, so a run must be resumed with the same ones.
MUST_AGREE = ("heads", "precision", "batch_size", "epochs", "lr", "weight_decay", "constant")
MUST_AGREE += ("clip", "seed", "double")


def update(model, optimizer, scheduler, args, rows, labels):
    """Make a step of the optimizer. Returns the mean loss, and the number predicted correctly."""
    optimizer.zero_grad()
    mean_loss = 0
    correct = 0
    # NEW: as many rows at a time as fit in memory. FSDP averages the gradients of each micro-batch
    # over the ranks, and adds them up in its shards, so no rank keeps whole gradients.
    micro_batches = zip(rows.split(args.rows), labels.split(args.rows), strict=True)
    for micro_rows, micro_labels in micro_batches:
        logits = model(micro_rows)
        total = F.cross_entropy(logits, micro_labels, reduction="sum")
        # NEW: divided by the tokens of all micro-batches, the losses add up to the mean. (With
        # labels of -100: token_mean.py.)
        loss = total / labels.numel()
        loss.backward()
        mean_loss += loss.detach()
        correct += (logits.argmax(dim=1) == micro_labels).sum()
    if args.clip:
        clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    scheduler.step()
    return mean_loss, correct


def warm_up_and_decay(step, steps):
    """Return the factor of the learning rate in a step: a line up, then a cosine down to 0.1."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)  # from 0 to 1
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


def make_optimizer(model, args):
    """Return AdamW, with which only matrices decay."""
    # NEW: a norm's vector of factors is near 1 and not near 0, so it must not shrink.
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, eps=1e-6, fused=True)


def flops_per_token(model):
    """Return the operations that training needs for a token, in linear layers and Attention."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    numbers = sum(layer.weight.numel() for layer in layers)
    # NEW: forward() multiplies by each number once, and adds. backward() does the same twice: for
    # the gradient of the inputs, and for that of the weight.
    of_layers = 6 * numbers
    # NEW: in a block, the query of a token is multiplied by the keys of all tokens of its row, and
    # the weights by their values. Each has as many numbers as a query. (PaLM and torchtitan, too,
    # count what the causal mask leaves out; Megatron-LM does not. None counts what checkpointing
    # computes again. Of a mixture, count only the experts that compute a token.)
    found = [module for module in model.modules() if isinstance(module, Attention)]
    of_attention = 6 * 2 * ROW * sum(attention.query.out_features for attention in found)
    return of_layers + of_attention


def train(args):
    """Train a language model, and let it write after each epoch."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)  # the same on all ranks, because each keeps a shard
    model = make_model(args)
    prepare(model, args)
    optimizer = make_optimizer(model, args)
    steps = args.epochs * len(train_loader)
    factor = (lambda step: 1.0) if args.constant else partial(warm_up_and_decay, steps=steps)
    scheduler = LambdaLR(optimizer, factor)
    parts = (model, optimizer, scheduler)
    done = resume(args, *parts) if args.run_dir else 0
    step = partial(update, *parts, args)
    for epoch in range(done, args.epochs):
        fit_epoch(epoch, model, step, train_loader, test_loader, device, args)
        if args.run_dir:
            folder = f"{args.run_dir}/epoch-{epoch + 1:04}"
            dcp.save(collect(args, epoch + 1, *parts), checkpoint_id=folder)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


# You can stop here: what follows prepares, saves, writes and prints. (`prepare` is worth a look.)


class Checkpointed(torch.nn.Module):
    """A block that keeps only its input for backward(), and computes the rest again there.

    A block with batch norm would update its running averages twice in each step.
    """

    def __init__(self, block):
        super().__init__()
        self.block = block  # adds "block." to names: resume with --checkpoint as it was before

    def forward(self, tokens):
        """Return what the block returns."""
        return checkpoint(self.block, tokens, use_reentrant=False)


def prepare(model, args):
    """Checkpoint the blocks, compile them, and shard the model."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))
    # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    dtype = DTYPES[args.precision]
    wide = torch.float64 if args.double else torch.float32
    inside = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide)
    for stage in (model.stage1, model.stage2):
        for position, layer in enumerate(stage):
            if not isinstance(layer, Block):
                continue
            # NEW: the compiler comes second, so that it sees what checkpoint() computes again. It
            # compiles each block alone, because all of them can use the same compiled code.
            if args.checkpoint:
                layer = Checkpointed(layer)
                stage[position] = layer
            if args.compile:
                layer.compile()
            # NEW: FSDP comes last. Its hooks gather the parameters before compiled code runs.
            fully_shard(layer, mesh=mesh, mp_policy=inside)
    # NEW: this call shards the rest, the embedding and the end of the model, which stay whole after
    # forward(). They are gathered together, because with --tied they have the same parameter (one
    # table), and FSDP refuses a parameter in two calls. Logits come out in 32 bits, for the loss.
    outside = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, output_dtype=wide)
    fully_shard(model, mesh=mesh, mp_policy=outside)


def collect(args, epoch, model, optimizer, scheduler):
    """Return what a checkpoint has: the shards of this rank, and what all ranks know."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "epoch": epoch}
    # NEW: to save, dcp calls scheduler.state_dict(), and to load, scheduler.load_state_dict().
    state["scheduler"] = scheduler
    state["flags"] = {flag: getattr(args, flag) for flag in MUST_AGREE}
    return state


def resume(args, model, optimizer, scheduler):
    """Load the newest checkpoint, if there is one. Returns how many epochs are done."""
    newest = [None]
    if dist.get_rank() == 0:
        folders = complete(args.run_dir)
        newest = [folders[-1] if folders else None]
    dist.broadcast_object_list(newest)
    path = newest[0]
    if path is None:
        return 0
    state = collect(args, None, model, optimizer, scheduler)
    dcp.load(state, checkpoint_id=path)  # overwrites all that this state has
    for flag, value in state["flags"].items():
        if value != getattr(args, flag):
            was = f"{path} was written with --{flag} {value}"
            raise ValueError(f"{was}: use the same flags, or a different --run_dir")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    if dist.get_rank() == 0:
        print(f"{path}: {state['epoch']} of {args.epochs} epochs are done", flush=True)
    return state["epoch"]


def sample(model, device, args):
    """Let the model write, byte by byte. Returns the text. All ranks must call this together."""
    generator = torch.Generator().manual_seed(args.seed)
    text = list(b"The ")
    for _ in range(args.sample):
        known = text[-ROW:]
        # No token sees those behind it, so zeros may fill the row. For each new length of rows, a
        # GPU would first have to prepare its kernels.
        rows = torch.tensor([known + [0] * (ROW - len(known))], device=device)
        with torch.no_grad():
            # NEW: every rank calls the model, because FSDP gathers each layer from all ranks.
            logits = model(rows)[0, :, len(known) - 1]  # scores for the byte that comes next
        chances = logits.float().softmax(dim=0).cpu()
        text.append(torch.multinomial(chances, 1, generator=generator).item())
    return re.sub(rb"[^\n -~]", b"?", bytes(text)).decode()  # no control characters


def fit_epoch(epoch, model, step, train_loader, test_loader, device, args):
    """Train for an epoch, test and write. Prints a line, how fast it was, and the text."""
    rank = dist.get_rank()
    train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
    # Dropout, if there is any, must differ between ranks and epochs, also after a resume.
    torch.manual_seed(args.seed + epoch * dist.get_world_size() + rank)
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    # Only rank 0 shows a bar, and only in a terminal.
    bar = tqdm(train_loader, title, leave=False, disable=None if rank == 0 else True)
    loss, correct, tokens = run_epoch(model, bar, device, step)
    seconds = time.perf_counter() - start
    test_loss, test_correct, test_tokens = run_epoch(model, test_loader, device)
    text = sample(model, device, args)
    if rank == 0:
        digits = 12 if args.double else 4
        needed = flops_per_token(model) * tokens
        used = needed / seconds / dist.get_world_size()  # by a rank in a second
        mfu = f"  MFU {used / args.peak:.1%}" if args.peak else ""
        memory = ""  # the peak of what this rank's tensors have taken on its GPU
        if args.device != "cpu":
            memory = f"  {torch.accelerator.max_memory_allocated() / 2**20:,.0f} MiB"
        print(
            f"{title}  loss {loss / tokens:.{digits}f}"
            f"  train {correct / tokens:.2%}  test {test_correct / test_tokens:.2%}"
            f"  {seconds:.2f} s  {tokens / seconds:,.0f} tokens/s{mfu}"
            f"  perplexity {math.exp(test_loss / test_tokens):.2f}{memory}",
            textwrap.indent(text, "    | ", lambda line: True),
            sep="\n",
            flush=True,
        )


def run_epoch(model, loader, device, step=None):
    """Train by calling step(rows, labels) for each batch, or only test if there is none.

    Returns three sums over the tokens of all ranks: the loss, the number predicted correctly, the
    number of tokens.
    """
    model.train(step is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for rows, labels in loader:
        rows = rows.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if step is not None:
            loss, correct = step(rows, labels)
        else:
            with torch.no_grad():
                logits = model(rows)
                loss = F.cross_entropy(logits, labels)
                correct = (logits.argmax(dim=1) == labels).sum()
        sums[0] += loss * labels.numel()
        sums[1] += correct
        sums[2] += labels.numel()
    dist.all_reduce(sums)
    return sums.tolist()


def add_flags(parser):
    """Add the flags that only this lesson has."""
    parser.set_defaults(model="language", batch_size=32, epochs=5, lr=5e-3)
    add = parser.add_argument
    add("--rows", type=flags.positive, default=8, help="rows that a rank computes at a time")
    add("--precision", choices=DTYPES, help="full: convert nothing; default: bfloat16")
    keep = "blocks keep only their input for backward(); resume a run as it was started"
    add("--checkpoint", action="store_true", help=keep)
    add("--compile", action="store_true", help="torch.compile; on a CPU, it needs a C++ compiler")
    add("--tied", action="store_true", help="one table: the output layer uses the embedding's")
    add("--clip", type=flags.number, default=1.0, help="largest norm of the gradients; 0: any")
    add("--constant", action="store_true", help="a constant learning rate")
    decay = "by what fraction of the learning rate a step shrinks the matrices"
    add("--weight_decay", type=flags.number, default=0.0, help=decay)
    folder = "folder for sharded checkpoints; resumes from its newest"
    add("--run_dir", type=flags.new_folder, help=folder)
    add("--peak", type=flags.number, default=0.0, help="a rank's operations per second")
    add("--sample", type=flags.positive, default=200, help="bytes to write after each epoch")


def check_flags(parser, args, world_size):
    """Refuse another model, and flags that do not fit each other."""
    parser.check_batch(args.batch_size, world_size)
    if args.model != "language":
        parser.error(f"--model {args.model} does not write: use --model language")
    if args.double and args.precision == "bfloat16":
        parser.error("--double computes in float64: leave out --precision bfloat16")
    if args.precision is None:
        args.precision = "full" if args.double else "bfloat16"


# ---------- Unchanged from fully_sharded_checkpoints.py ----------
# You know what follows: complete(), join() and main(). If you copy this lesson, copy this, too.


def complete(run_dir):
    """Return the folders of complete checkpoints, the newest one last."""
    # The file .metadata is written last, so a folder without it is not complete.
    folders = [file.parent for file in Path(run_dir).glob("epoch-*/.metadata")]
    numbered = [folder for folder in folders if folder.name[6:].isdigit()]
    return [str(folder) for folder in sorted(numbered, key=lambda folder: int(folder.name[6:]))]


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
