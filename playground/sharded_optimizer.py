"""Stage 1 of ZeRO, by hand: each rank keeps the optimizer's state for one shard of the parameters.

DDP replicates everything. With Adam in float32, every parameter costs each rank 16 bytes: 4 for its
value, 4 for its gradient, and 8 for Adam's two averages. ZeRO (https://arxiv.org/abs/1910.02054)
shards them in three stages. With n ranks, each rank then keeps this much from one step to the next:

    stage 1    8 + 8/n bytes: Adam's averages are sharded (this lesson)
    stage 2    4 + 12/n bytes: the gradients are sharded as well
    stage 3    16/n bytes: the parameters are sharded as well (the next lesson)

All parameters are joined into one flat tensor. Its n shards have the same length, and each rank
updates one of them. A step has three parts:

  1. A reduce_scatter averages the gradients. Each rank receives the mean gradient of its shard.
  2. The optimizer of each rank updates its shard, and keeps Adam's averages for this shard only.
  3. An all_gather sends the updated shards to all ranks.

A reduce_scatter and an all_gather together send as much as an all_reduce. So stage 1 saves memory
and sends no more than DDP.

This works with every optimizer that updates each number separately, such as SGD, Adam or AdamW.
PyTorch has its own version, torch.distributed.optim.ZeroRedundancyOptimizer.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/sharded_optimizer.py

It prints the same numbers as single_gpu.py. Then it counts what the ranks hold and send in one more
step:
    bytes     parameters    gradients     Adam's state  together      /parameter    sent in a step
    rank 0    236,840       236,840       236,844       710,524       12.00         236,840
    formula   236,840       236,840       236,840       710,520       12.00         236,840
    DDP       236,840       236,840       473,680       947,360       16.00         236,840

Adam's state has 4 bytes more than the formula, because Adam also counts its steps.

Try breaking it, in a copy (cp playground/sharded_optimizer.py playground/broken.py):
  1. Write `make_optimizer([self.flat])`. What is trained now? Which column of the table shows it?
  2. Comment out the all_gather. Which parameters does each rank train then?
  3. Comment out the two lines of the broadcast, and write `torch.manual_seed(args.seed + rank)`
     before `model = ...`. Which parameters do the ranks have after the first step?

Now write it yourself, for any model: shard_optimizer.py in playground/exercises/.

The next lesson, manual_fully_sharded.py, shards the gradients and the parameters as well.
"""

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
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.memory import show_memory


def flatten(tensors):
    """Copy tensors into one flat tensor, with zeros at its end, so that n divides its length."""
    parts = [tensor.flatten() for tensor in tensors]
    length = sum(len(part) for part in parts)
    padding = -length % dist.get_world_size()  # the distance to the next multiple of n
    return torch.cat([*parts, parts[0].new_zeros(padding)])


class ShardedOptimizer:
    """Updates all parameters of a model, but keeps only this rank's shard of the optimizer's state.

    Every parameter must get a gradient in each step, and all must have the same dtype.
    """

    def __init__(self, model, make_optimizer):
        self.parameters = dict(model.named_parameters())
        # NEW: from here on, the parameters are views of one flat tensor, and share its memory.
        self.flat = flatten([parameter.detach() for parameter in self.parameters.values()])
        start = 0
        for parameter in self.parameters.values():
            end = start + parameter.numel()
            parameter.data = self.flat[start:end].view(parameter.shape)
            start = end
        self.shard = self.flat.chunk(dist.get_world_size())[dist.get_rank()]
        # NEW: the optimizer knows this rank's shard only. Autograd does not know this tensor, so
        # step() sets its .grad.
        self.optimizer = make_optimizer([self.shard])

    def zero_grad(self):
        """Free the gradients of the previous step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self):
        """Update this rank's shard with the mean gradient, and gather the shards of all ranks."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise ValueError(f"{name} has no gradient: ShardedOptimizer needs all of them")
        # A second copy of the gradients, which takes memory until the end of this function.
        gradients = flatten([parameter.grad for parameter in self.parameters.values()])
        gradients /= dist.get_world_size()  # the sum over the ranks is then the mean
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, gradients)  # NEW: part 1
        self.optimizer.step()  # NEW: part 2
        self.shard.grad = None  # frees its memory
        # NEW: part 3. Its input may be a part of its output, if it is the part of this rank.
        dist.all_gather_into_tensor(self.flat, self.shard)


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
    """Train, or only test if there is no optimizer. Returns sums over the images of all ranks."""
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
            optimizer.step()  # NEW: averages the gradients, too
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch. Then count the bytes of a step."""
    rank, device = join(args)
    meet(args)  # guard rail: stops if the ranks have different flags
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # all ranks start with the parameters of rank 0, as with DDP
    torch.manual_seed(args.seed + rank)
    make_optimizer = partial(torch.optim.Adam, lr=args.lr, eps=1e-6, fused=True)
    optimizer = ShardedOptimizer(model, make_optimizer)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    show_memory(1, model, optimizer, *next(iter(train_loader)))
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
