"""Sharding by hand: ZeRO's three stages, one after the other.

DDP replicates everything. With Adam in float32, every parameter costs each rank 16 bytes: 4 for its
value, 4 for its gradient, and 8 for Adam's two averages. ZeRO (https://arxiv.org/abs/1910.02054)
saves memory in three stages. It joins the numbers of the parameters into one long list, and cuts it
into as many shards as there are ranks, all of the same length. Each rank keeps one shard. With n
ranks, each rank then keeps this much for a parameter from one step to the next:

    --stage 1    8 + 8/n bytes: Adam's averages are sharded
    --stage 2    4 + 12/n bytes: the gradients are sharded as well
    --stage 3    16/n bytes: the parameters are sharded as well

A step of stage 1 has three parts:
  1. After backward(), a reduce_scatter gives each rank the mean gradient of its shard.
  2. The optimizer of the rank updates this shard.
  3. An all_gather gives every rank the updated shards of all ranks.

Together, a reduce_scatter and an all_gather send as much as one all_reduce. So stages 1 and 2 send
as much as DDP. Stage 3, which PyTorch calls FSDP, sends 1.5 times as much, because it gathers the
parameters twice in each step: for the forward pass and for backward().

All stages work with any optimizer that updates each number separately, such as Adam, AdamW or SGD.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/manual_sharding.py --stage 2

It prints the same numbers as single_gpu.py. Then it counts what the ranks hold and send in one more
step:
    bytes     parameters    gradients     Adam's state  together      /parameter    sent in a step
    rank 0    236,840       118,420       236,872       592,132       10.00         236,872
    formula   236,840       118,420       236,840       592,100       10.00         236,840
    DDP       236,840       236,840       473,680       947,360       16.00         236,840

The rank holds 32 bytes more than the formula, because Adam counts its steps. It sends 32 bytes
more, because the ranks tell each other which parameters have a gradient.

Try breaking it, in a copy (cp playground/manual_sharding.py playground/broken.py):
  1. In Stage2, give the optimizer `self.parameters` in place of `self.shards`. What is trained with
     --stage 2, and which column of the table shows it?
  2. Comment out the two lines of the broadcast, and write `torch.manual_seed(args.seed + rank)`
     before `model = ...`. Which parameters do the ranks start with?
  3. Comment out `layer.forward = ...`, and run it with --stage 3 --width 512. The last two lines
     show the whole parameters in memory and the messages of a step. What changes in them?

Now write it yourself: shard_optimizer.py and gather_layer.py in playground/exercises/.

The next lesson, fully_sharded_data_parallel.py, leaves stage 3 to PyTorch.
"""

import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.nn.utils import parametrize, vector_to_parameters
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.memory import show_memory


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
    # The address, the rank and the world size come from the environment.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    node = os.environ.get("GROUP_RANK", "0")
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, rank_row(node, rank, local_rank, device))
    if rank == 0:
        print(RANKS, *rows, sep="\n", flush=True)
    return rank, device


def flat_copy(tensors):
    """Copy tensors into one flat tensor.

    Zeros at its end make its length a multiple of the number of ranks, so that all shards have the
    same length.
    """
    flat = [tensor.detach().flatten() for tensor in tensors]
    length = sum(len(each) for each in flat)
    missing = -length % dist.get_world_size()  # the distance to the next multiple
    zeros = flat[0].new_zeros(missing)
    return torch.cat([*flat, zeros])


def own_shard(flat):
    """Return the shard of a flat tensor that this rank keeps, as a view."""
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


def shard_of_mean(tensors):
    """Average flat copies of tensors over all ranks. Returns this rank's shard of the mean."""
    flat = flat_copy(tensors)
    flat /= dist.get_world_size()  # the sum over the ranks is then the mean
    shard = torch.empty_like(own_shard(flat))
    dist.reduce_scatter_tensor(shard, flat)  # adds over all ranks; each rank gets only its shard
    return shard


def gradient_of(parameter):
    """Return the gradient of a parameter, or zeros if this rank has not used the parameter."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad


def used_on_any_rank(used, device):
    """Return, for each parameter, 1 if it was used on any rank, and 0 if it was not."""
    used = torch.tensor(used, dtype=torch.int32, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    return used.tolist()


class Stage1:
    """Shard the optimizer's state: each rank updates one shard of the parameters.

    A training loop uses it like an optimizer.
    """

    def __init__(self, model, make_optimizer):
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        if len({parameter.dtype for parameter in self.parameters}) > 1:
            sys.exit("error: stage 1 puts all parameters into a tensor of one dtype: use --stage 2")
        # NEW: one flat tensor has the values of all parameters, which become views of it.
        self.flat = flat_copy(self.parameters)
        vector_to_parameters(self.flat, self.parameters)
        self.shard = own_shard(self.flat)
        # NEW: the optimizer gets this rank's shard only, so it keeps 1/n of the state. An optimizer
        # takes any tensor that has a .grad. If a model uses all its parameters,
        # make_optimizer([self.shard]) would do. Here the shard is split into one view for each
        # parameter, so that the optimizer can skip a parameter that is not used.
        self.views = self.split(self.shard)
        self.optimizer = make_optimizer(self.views)

    def split(self, shard):
        """Return the part of each parameter that lies in this shard, as a view.

        The optimizer gets these parts instead of one tensor, so it can skip a parameter that has no
        gradient. If no part of a parameter lies in this shard, its view is empty.
        """
        views = []
        # start and end are the positions of a parameter, counted from the first number of this
        # shard. Positions in the shards of earlier ranks are negative. A slice that reaches beyond
        # the end of the shard stops there.
        start = -dist.get_rank() * len(shard)
        for parameter in self.parameters:
            end = start + parameter.numel()
            views.append(shard[max(0, start) : max(0, end)])
            start = end
        return views

    def zero_grad(self):
        """Free the gradients of the previous step."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self):
        """Update this rank's shard with the mean gradient, and gather the updated shards."""
        gradients = shard_of_mean([gradient_of(parameter) for parameter in self.parameters])
        used = [parameter.grad is not None for parameter in self.parameters]
        used = used_on_any_rank(used, self.flat.device)
        for view, gradient, is_used in zip(self.views, self.split(gradients), used, strict=True):
            view.grad = gradient if is_used else None
        self.optimizer.step()
        self.optimizer.zero_grad()  # frees this rank's shard of the gradients
        # NEW: gathers the updated shards into self.flat. The parameters are views of it, and so is
        # self.shard: the input may be a part of the output.
        dist.all_gather_into_tensor(self.flat, self.shard)


class Stage2:
    """Shard the gradients as well: average each one as soon as backward() has computed it.

    A training loop uses it like an optimizer, with one backward() for each step.
    """

    def __init__(self, model, make_optimizer):
        trained = [each for each in model.parameters() if each.requires_grad]
        self.parameters = trained[::-1]  # backward() computes the gradient of the last one first
        self.flat = []
        self.shards = []
        for position, parameter in enumerate(self.parameters):
            flat = flat_copy([parameter])  # as in stage 1, but one for each parameter
            vector_to_parameters(flat, [parameter])
            self.flat.append(flat)
            self.shards.append(own_shard(flat))
            # NEW: backward() calls this function as soon as the parameter has its gradient.
            parameter.register_post_accumulate_grad_hook(partial(self.average_ready, position))
        self.optimizer = make_optimizer(self.shards)
        self.zero_grad()

    def average_ready(self, position, parameter):
        """Average the gradients that are ready, in the order of the list, which all ranks share.

        Ranks may compute gradients in different orders, because their images may use different
        layers. So a gradient waits until those before it in the list are averaged.
        """
        if position < self.next:  # this gradient of the step has been averaged already
            raise RuntimeError("stage 2 needs step() and zero_grad() before the next backward()")
        while self.next < len(self.parameters) and self.parameters[self.next].grad is not None:
            self.average_next()

    def average_next(self):
        """Average the next gradient of the list, and keep only this rank's shard of it."""
        parameter = self.parameters[self.next]
        self.used[self.next] = parameter.grad is not None
        self.shards[self.next].grad = shard_of_mean([gradient_of(parameter)])
        parameter.grad = None  # NEW: frees the whole gradient while backward() continues
        self.next += 1

    def zero_grad(self):
        """Free the gradients of the previous step."""
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.zero_grad()
        self.next = 0  # position in self.parameters of the gradient that is averaged next
        self.used = [False] * len(self.parameters)

    def step(self):
        """Update this rank's shards with the mean gradients, and gather the updated shards."""
        while self.next < len(self.parameters):
            self.average_next()  # the hooks waited for a gradient that never came
        used = used_on_any_rank(self.used, self.flat[0].device)
        for shard, is_used in zip(self.shards, used, strict=True):
            if not is_used:
                shard.grad = None
        self.optimizer.step()
        for flat, shard in zip(self.flat, self.shards, strict=True):
            dist.all_gather_into_tensor(flat, shard)


class Gather(torch.autograd.Function):
    """Forward: gathers a parameter from its shards. Backward: averages and shards its gradient.

    shard_parameters(), below, explains how stage 3 uses this class and the next one.
    """

    @staticmethod
    def forward(ctx, shard, shape):
        """Gather the shards of all ranks."""
        flat = shard.new_empty(len(shard) * dist.get_world_size())
        dist.all_gather_into_tensor(flat, shard)
        return flat[: shape.numel()].view(shape)

    @staticmethod
    def backward(ctx, gradient):
        """Average the gradient over all ranks. The shape needs no gradient."""
        return shard_of_mean([gradient]), None


class GatherWhenRead(nn.Module):
    """Makes `layer.weight` a computed value: PyTorch calls forward(shard) when it is read."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def forward(self, shard):
        """Return the whole parameter."""
        return Gather.apply(shard, self.shape)


def shard_parameters(model):
    """Stage 3: shard the parameters as well. A layer gathers them each time it computes.

    Three parts of PyTorch work together:

      - A parametrization replaces the parameter of a layer with its shard. Each time the layer
        reads layer.weight, PyTorch calls GatherWhenRead.forward(), which gathers the shards.
      - Gather is an autograd function, so backward() calls Gather.backward(). This averages the
        gradient of the whole parameter over the ranks, and returns a shard of it.
      - checkpoint() frees the whole parameter after forward(), and gathers it again in backward().

    As with FSDP, all ranks must run the same layers. A rank that leaves one out does not take part
    in its messages, and the others wait for it.
    """
    shapes = {}
    for parameter in model.parameters():  # a parameter that two layers share appears once
        shapes[parameter] = parameter.shape
        parameter.data = own_shard(flat_copy([parameter])).clone()  # NEW: all that this rank keeps
    for layer in list(model.modules()):
        own = list(layer.named_parameters(recurse=False, remove_duplicate=False))
        if not own:
            continue
        # checkpoint(), below, runs forward() twice, so batch norm would count each batch twice.
        if getattr(layer, "track_running_stats", False):
            sys.exit("error: stage 3 would update the averages of batch norm twice: use --stage 2")
        for name, parameter in own:
            gather = GatherWhenRead(shapes[parameter])
            # unsafe=True lets the shard and the parameter differ in shape.
            parametrize.register_parametrization(layer, name, gather, unsafe=True)
        # NEW: autograd would keep the whole parameters for backward(). checkpoint() writes no file:
        # it keeps only the input of the layer. In backward() it runs forward() again, and this
        # gathers the parameters again.
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over the images of all ranks: the loss, the number classified correctly, the
    number of images.
    """
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
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # all ranks start with the parameters of rank 0, as with DDP
    torch.manual_seed(args.seed + rank)
    count = sum(parameter.numel() for parameter in model.parameters())
    make_optimizer = partial(torch.optim.Adam, lr=args.lr, eps=1e-6, fused=True)
    if args.stage == 1:
        optimizer = Stage1(model, make_optimizer)
    elif args.stage == 2:
        optimizer = Stage2(model, make_optimizer)
    else:
        shard_parameters(model)
        optimizer = make_optimizer(model.parameters())  # NEW: they are shards now

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    images, labels = next(iter(train_loader))
    show_memory(args.stage, count, model, optimizer, images.to(device), labels.to(device))
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--stage", type=int, choices=[1, 2, 3], default=3, help="how much is sharded; 3: all")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    # The ranks of a node fetch the data one at a time, so it is downloaded once.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
