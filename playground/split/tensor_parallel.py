"""Tensor parallelism: each rank keeps and computes a part of every pair of linear layers.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/split/tensor_parallel.py

It prints the same numbers as `single_gpu.py`, up to rounding (with `--double` all twelve digits
agree). Then it shows what each rank keeps: half of 59,210 parameters, plus 37, because the second
layers' 74 biases are not split:
    rank 0 keeps 29,642 parameters
    rank 1 keeps 29,642 parameters

The layers are split in pairs, y = ReLU(x A) B. Each rank keeps some columns of A and the matching
rows of B. ReLU acts on each number separately, so every rank computes one term of y without a
message in between. Then an all_reduce adds up the terms (`playground/pages/figures/tensor.svg`):

    x = [1 2]    A = [1 0 | 2  1]    B = [1 0]    rank 0: ReLU([1  2]) B0 = [1 2]
                     [0 1 | 1 -2]        [0 1]    rank 1: ReLU([4 -3]) B1 = [4 4]
                                         -----
                                         [1 1]    all_reduce:           y = [5 6]
                                         [2 0]

The gradient of x is such a sum, too: each rank has used x for other columns. So `backward()` needs
an all_reduce where the pair begins. (So a pair begins with "nothing, all_reduce" of
`message_gradients.py`, and ends with "all_reduce, nothing".) All ranks read the same images, so
nothing is averaged. A pair waits for these messages, so keep the ranks in one node
(https://arxiv.org/abs/1909.08053).

Shards made by hand are plain parameters, which PyTorch takes for whole ones. `clip_grad_norm_`
finds a different norm on each rank, without an error: add up the shards' squares over all ranks,
and count whole parameters once. `torch.distributed.checkpoint` would save only one rank's shard of
each parameter. So `state_dict()` raises an error here, and each rank can save its own parameters.
With `--by dtensor`, PyTorch splits the same layers, and their parameters become DTensors, which
know what they are shards of. With the MLP, `clip_grad_norm_` and checkpoints are then right. (The
CNN's convolutions stay plain parameters, and `clip_grad_norm_` refuses the mixture.)

Try breaking it, in a copy beside it, with `--double`. Compare the losses, and what the ranks keep:
  1. In ColumnLinear, leave out the line with `Message`. What goes wrong?
  2. Before `make_model`, seed with `args.seed + rank`. Is there an error? Try `--by dtensor`, too.
  3. In `fit_epoch()`, write `set_epoch(epoch + rank)`. Is there an error?
  4. Write `plan[first + "x"]`, and use `--by dtensor`. Then misspell the other key as well.
Now write it yourself: `split_pair.py` in `playground/exercises/`. In `playground/museum/`, repair
`split_matrices.py`.
Builds on: message_gradients.py
The next lesson, `hybrid_parallel.py`, combines tensor parallelism with FSDP.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


def keep_shard(parameter, dim):
    """Return this rank's shard of a parameter, as a new parameter. Their sizes may differ by 1."""
    shard = parameter.detach().tensor_split(dist.get_world_size(), dim)[dist.get_rank()]
    shard = shard.clone()  # otherwise the whole parameter would stay in memory
    return torch.nn.Parameter(shard, requires_grad=parameter.requires_grad)


class ColumnLinear(torch.nn.Module):
    """The first layer of a pair: this rank keeps some columns of A, and computes some outputs."""

    def __init__(self, layer):
        super().__init__()
        # nn.Linear stores its matrix transposed, so the columns of A lie along dimension 0. The
        # bias has one number for each of them.
        self.weight = keep_shard(layer.weight, dim=0)
        self.bias = None if layer.bias is None else keep_shard(layer.bias, dim=0)
        self.register_state_dict_pre_hook(refuse_state)

    def forward(self, inputs):
        """Take the whole input. Return this rank's part of the output."""
        # NEW: all ranks have x, so nothing is sent. x A = [x A0 | x A1]. If these two parts have
        # the gradients g0 and g1, x has g0 A0.T + g1 A1.T. Each rank has computed one of the terms.
        inputs = Message.apply(inputs, nothing, all_reduce, None)
        return F.linear(inputs, self.weight, self.bias)


class RowLinear(torch.nn.Module):
    """The second layer of a pair: this rank keeps the rows of B that match its columns of A."""

    def __init__(self, layer):
        super().__init__()
        self.weight = keep_shard(layer.weight, dim=1)
        self.bias = layer.bias  # whole on every rank, and its gradient needs no message
        self.register_state_dict_pre_hook(refuse_state)

    def forward(self, inputs):
        """Take this rank's part of the input. Return the whole output."""
        # NEW: with h = ReLU(x A), y = [h0 | h1] B = h0 B0 + h1 B1, where B0 stands above B1. Each
        # term has the gradient of y, which all ranks know, because they compute the same loss.
        output = Message.apply(F.linear(inputs, self.weight), all_reduce, nothing, None)
        return output if self.bias is None else output + self.bias  # once, after the sum


def split(model, pairs):
    """Keep only this rank's shards of the linear layers whose names are in `pairs`."""
    for first, second in pairs:
        # NEW: some columns of the first matrix, and the matching rows of the second
        model.set_submodule(first, ColumnLinear(model.get_submodule(first)))
        model.set_submodule(second, RowLinear(model.get_submodule(second)))


def train(args):
    """Split a model, train it, and show what each rank keeps."""
    rank, device = join(args)
    # NEW: all ranks read the same images. So run_epoch() counts each image once for every rank,
    # which changes neither the mean loss nor the percentages.
    train_loader, test_loader = loaders(args)
    # The same seed on all ranks, because each keeps a shard of the same random parameters. Dropout
    # outside the pairs must be the same on all ranks, too.
    torch.manual_seed(args.seed)
    model = make_model(args)
    pairs = find_pairs(model)
    if args.by == "hand":
        split(model, pairs)
    else:
        split_by_dtensor(model, pairs, args)
    model = model.to(device)  # NEW: only now, so the whole model need not fit on a GPU
    # Adam's fused code refuses DTensors beside plain tensors, such as those of layers left whole.
    fused = len({type(parameter) for parameter in model.parameters()}) == 1
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=fused)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    show_shards(model)
    dist.barrier()  # DTensor keeps the group, and without this Python may abort at exit
    dist.destroy_process_group()


def find_pairs(model):
    """Return the names of the linear layers in pairs. A last one without a partner stays whole.

    This fits the MLP and the CNN of this course. For your own model, list the pairs. Between its
    two layers, only elementwise functions may stand (ReLU or GELU; not softmax or GLU; nor dropout,
    whose mask would be the same on all ranks).
    """
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    return list(zip(linear[::2], linear[1::2], strict=False))


def split_by_dtensor(model, pairs, args):
    """Let PyTorch split the same layers. Their parameters become DTensors."""
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size(),))  # all ranks, in a row
    # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
    mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
    plan = {}
    for first, second in pairs:
        plan[first] = ColwiseParallel()
        plan[second] = RowwiseParallel()
    # NEW: replaces everything that this file writes by hand. It moves one parameter at a time to
    # the device, and keeps its shard.
    parallelize_module(model, mesh, plan)


def refuse_state(*_):  # *_: what PyTorch passes to a hook, which is not needed here
    """Refuse state_dict(), because all ranks' shards have the same names, as replicas have."""
    if dist.get_world_size() > 1:
        wrong = "a layer is split, and a checkpoint would take its shards for replicas"
        raise RuntimeError(
            f"{wrong}: torch.save [*model.parameters()] of each rank, or use DTensors"
        )


# You can stop here: what follows only prints, and reads and checks the flags.


def show_shards(model):
    """Print the number of parameters that each rank keeps."""
    kept = 0
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            parameter = parameter.to_local()
        kept += parameter.numel()
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, f"rank {dist.get_rank()} keeps {kept:,} parameters")
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def add_flags(parser):
    """Add the flag that only this lesson has."""
    help = "what splits the layers: this file, or PyTorch's DTensor"
    parser.add_argument("--by", choices=["hand", "dtensor"], default="hand", help=help)


def check_flags(parser, args, world_size):
    """Refuse a model that the ranks cannot split. The batch is never split."""
    if args.model not in ("mlp", "cnn"):
        parser.error(f"head_parallel.py splits --model {args.model}: use mlp or cnn here")
    if args.width % world_size:
        near = max(1, round(args.width / world_size)) * world_size
        parser.error(f"{world_size} ranks cannot split --width {args.width}: use {near}")


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
