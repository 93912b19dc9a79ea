"""Tensor parallelism: the ranks split linear layers, and all of them process the same images.

Linear layers are split in pairs, y = ReLU(x A) B. Each rank keeps some columns of A, so it computes
some of the numbers of x A. ReLU changes each number separately. Each rank also keeps the matching
rows of B. Its part of ReLU(x A) times its rows of B is one term of y, and an all_reduce adds up the
terms. An example for two ranks:

    x = [1 2]      A = [1 0 | 2 1]      B = [1 0]
                       [0 1 | 1 1]          [0 1]
                                            -----
                                            [1 1]
                                            [2 0]

    rank 0: x A0 = [1 2]                         rank 1: x A1 = [4 3]
            y0 = ReLU(x A0) B0 = [1 2]                   y1 = ReLU(x A1) B1 = [10 4]

    the all_reduce: y = y0 + y1 = [11 6] = ReLU(x A) B

In the backward pass, each rank has the gradient of y, which is also the gradient of its term. So no
message is needed where a pair ends. Both ranks have used x, so its gradient is the sum over the
ranks, and an all_reduce is needed where the pair begins. Let the gradient of y be g = [1 1]. (ReLU
passes gradients on unchanged here, because all numbers of x A are positive.)

    rank 0: g B0.T = [1 1]                       rank 1: g B1.T = [2 2]
            [1 1] A0.T = [1 1]                           [2 2] A1.T = [6 4]

    the all_reduce: [1 1] + [6 4] = [7 5], the gradient of x in a single process

All ranks have the same images, so they have the same g. Each shard gets the gradient that it has in
a single process. So nothing is averaged over the ranks, and nothing is divided by n. Copy and Add,
below, are the two ends of a pair (https://arxiv.org/abs/1909.08053).

Run it:
    torchrun --standalone --nproc-per-node 2 playground/tensor_parallel.py --compare
    torchrun --standalone --nproc-per-node 2 playground/tensor_parallel.py --compare --by dtensor

It prints how much a step differs from the whole model's, and then single_gpu.py's numbers:
    outputs differ from the whole model's by 4e-08, gradients by 4e-09
    all_reduce in forward: 2, in backward: 1 (predicted: 2 and 1)
The first of the two pairs sends nothing in backward(), because images need no gradient.

Try breaking it, in a copy, and run it with --compare:
  1. In ColumnLinear, replace `Copy.apply(inputs)` with `inputs`. Which numbers are still right?
  2. Before `model = ...`, seed with `args.seed + rank`. Is there an error? Try --by dtensor, too.
  3. Write `set_epoch(epoch + rank)`. Is there an error?
  4. Write `plan[column + "x"]`, and use --by dtensor. Then misspell the other key as well.

Now write it yourself: split_pair.py in playground/exercises/.

The next lesson, hybrid_parallel.py, combines tensor parallelism with FSDP.
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import WIDTH, make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.steps import compare_step


class Copy(torch.autograd.Function):
    """The beginning of a pair: all ranks use the same input."""

    @staticmethod
    def forward(ctx, inputs):
        """Return the input itself. Autograd still calls backward() at this place."""
        return inputs

    @staticmethod
    def backward(ctx, gradient):
        """Return the sum of the gradients of all ranks."""
        total = gradient.clone()  # autograd may need the gradient itself in another place
        dist.all_reduce(total)  # NEW: because each rank has used the input
        return total


class Add(torch.autograd.Function):
    """The end of a pair: each rank has one term of the output."""

    @staticmethod
    def forward(ctx, term):
        """Return the sum of the terms of all ranks."""
        # all_reduce overwrites its tensor, and autograd does not notice that. Some functions, such
        # as a sigmoid, need their output again in backward(). So reduce a copy.
        total = term.clone()
        dist.all_reduce(total)  # NEW: because each rank has one term
        return total

    @staticmethod
    def backward(ctx, gradient):
        """Return the gradient unchanged: the gradient of a sum is that of each of its terms."""
        return gradient


def keep_shard(parameter, dim):
    """Return this rank's shard of a parameter, as a parameter of its own."""
    world_size = dist.get_world_size()
    size = parameter.shape[dim]
    if size % world_size:
        raise ValueError(f"a dimension of size {size} cannot be divided by {world_size} ranks")
    shard = parameter.detach().chunk(world_size, dim)[dist.get_rank()]
    # A copy, so that the memory of the whole parameter can be freed.
    return torch.nn.Parameter(shard.clone(), requires_grad=parameter.requires_grad)


class ColumnLinear(torch.nn.Module):
    """The first layer of a pair: this rank keeps some columns, and computes some outputs."""

    def __init__(self, layer):
        super().__init__()
        # nn.Linear stores a matrix transposed. So columns are split along dimension 0, and rows
        # along dimension 1.
        self.weight = keep_shard(layer.weight, dim=0)
        self.bias = None
        if layer.bias is not None:
            self.bias = keep_shard(layer.bias, dim=0)  # it has one number for each output

    def forward(self, inputs):
        """Take the whole input. Return this rank's part of the output."""
        return F.linear(Copy.apply(inputs), self.weight, self.bias)


class RowLinear(torch.nn.Module):
    """The second layer of a pair: this rank keeps the rows for its part of the first layer."""

    def __init__(self, layer):
        super().__init__()
        self.weight = keep_shard(layer.weight, dim=1)
        # Whole on each rank. All ranks have the same output, so they compute the same gradient of
        # the bias without a message.
        self.bias = layer.bias

    def forward(self, inputs):
        """Take this rank's part of the input. Return the whole output."""
        outputs = Add.apply(F.linear(inputs, self.weight))
        if self.bias is None:
            return outputs
        return outputs + self.bias  # once, after the sum over the ranks


def find_pairs(model):
    """Return the names of the linear layers, in pairs. A last layer without a partner stays whole.

    Between the layers of a pair, there may only be functions that change each number separately,
    such as ReLU. This holds for the models of this course. For your own model, list the pairs.
    """
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    return list(zip(linear[::2], linear[1::2], strict=False))


def split_by_hand(model, pairs):
    """Replace the layers of each pair with layers that keep only this rank's shards."""
    count = len(list(model.parameters()))
    for column, row in pairs:
        model.set_submodule(column, ColumnLinear(model.get_submodule(column)))
        model.set_submodule(row, RowLinear(model.get_submodule(row)))
    # Splitting a layer makes new parameters. If two layers shared one, each now has its own, so
    # parameters() yields more than before.
    if len(list(model.parameters())) > count:
        raise ValueError(
            "layers that share a parameter cannot be split: leave them out of the pairs"
        )


def split_by_dtensor(model, pairs, mesh):
    """Let PyTorch split the layers. Parameters become DTensors: tensors that know their shards."""
    plan = {}  # its keys are the names of layers, as in model.named_modules()
    for column, row in pairs:
        plan[column] = ColwiseParallel()
        plan[row] = RowwiseParallel()
    # NEW: does what is written by hand above. It moves each parameter to the device and then keeps
    # only a shard, one whole parameter at a time.
    parallelize_module(model, mesh, plan)


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


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer. Returns sums over all images."""
    model.train(optimizer is not None)
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
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    return sums.tolist()  # NEW: without an all_reduce, because each rank has seen all images


def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    if rank == 0 and world_size > local_world_size:
        # NEW: each pair of layers waits for a message, which takes longer between nodes.
        print("The ranks span several nodes: each pair of layers waits for the network", flush=True)
    train_loader, test_loader = loaders(args)  # NEW: all ranks read the same images
    torch.manual_seed(args.seed)
    # NEW: the whole model is made on the CPU, and moved after it is split. So only the shards of
    # this rank must fit on its GPU, and with --by dtensor one whole parameter at a time.
    model = make_model(args)
    pairs = find_pairs(model)
    if args.by == "hand":
        split_by_hand(model, pairs)
    else:
        mesh = dist.init_device_mesh(device.type, (world_size,))  # all ranks, in a row
        # The group of a mesh may have PyTorch's own timeout: 30 minutes (gloo) or 10 (NCCL).
        mesh.get_group().set_timeout(timedelta(seconds=args.timeout))
        split_by_dtensor(model, pairs, mesh)
    model = model.to(device)
    if args.compare:
        torch.manual_seed(args.seed)  # so the whole model starts from the same parameters
        compare_step(model, make_model(args), *next(iter(train_loader)))
    # NEW: fused=True does not work with DTensors and plain tensors together. With --by dtensor, the
    # layers outside the pairs keep plain tensors.
    kinds = {isinstance(parameter, DTensor) for parameter in model.parameters()}
    fused = len(kinds) == 1
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=fused)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    add = parser.add_argument
    add(
        "--by",
        choices=["hand", "dtensor"],
        default="hand",
        help="what splits the layers: this file, or PyTorch's DTensors",
    )
    add("--compare", action="store_true", help="first compare a step with that of the whole model")
    args = parser.parse_args()
    check(parser, args, replicas=1)  # guard rail: refuses impossible flags
    if args.model == "transformer":
        parser.error("--model transformer: sequence_parallel.py splits it; here use --model mlp")
    world_size = int(os.environ["WORLD_SIZE"])
    width = args.width or WIDTH[args.model]
    if width % world_size:
        nearest = max(1, round(width / world_size)) * world_size
        wrong = f"--width {width} cannot be divided by {world_size} processes"
        parser.error(f"{wrong}: use --width {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
