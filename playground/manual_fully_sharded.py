"""Stage 3 of ZeRO, by hand: the parameters are sharded, and whole only while a layer computes.

Each rank keeps one shard of each layer: 1/n of its numbers, of their gradients and of Adam's
averages. That is 16/n bytes for a parameter. A layer needs all of its parameters to compute, so the
ranks gather them before, and free them after. PyTorch can call a function at such a moment. This
function is called a hook. Four moments are enough:

    before a layer's forward()               gather()
    after it                                 free()
    before backward() reaches the layer      gather()
    when the layer's last gradient is there  average_gradients(), then free()

For each layer, the ranks need two all_gathers and a reduce_scatter. So each rank sends 1.5 times as
much as with DDP. With --keep_weights, a layer stays whole from forward() to backward(). This leaves
out the second all_gather. The ranks then send as much as with DDP, or as with stage 2 of ZeRO.

PyTorch's FSDP, the next lesson, sends the same messages. It hides a part of their time: while layer
3 computes its gradients, it already gathers layer 2 (prefetching). Here, nothing computes while a
message travels.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/manual_fully_sharded.py
    torchrun --standalone --nproc-per-node 2 playground/manual_fully_sharded.py --keep_weights

It prints the same numbers as single_gpu.py. Then it counts what the ranks hold and send in one more
step, and shows when they wait for a message. This is the first command:
    bytes     parameters    gradients     Adam's state  together      /parameter    sent in a step
    rank 0    118,420       118,420       236,856       473,696       8.00          355,260
    formula   118,420       118,420       236,840       473,680       8.00          355,260
    DDP       236,840       236,840       473,680       947,360       16.00         236,840
    whole parameters in memory at the same time: at most 200,960 bytes
    messages of a step: 8 all_gather, 4 reduce_scatter, 0 all_reduce. DDP: one for each bucket
    rank 0 |ggg..gggg.gggggggrrrrrrrrrrrrrrrrrrrr.ggg.r.gg.rrrgg..rrr...|
    rank 1 |gg.gggggg.gg.gggggg.rrrrrrrrrrrrrrrrr.gg.rrrrrgggrrrggg..rrr|

In the last two lines, g is an all_gather, r a reduce_scatter, and a dot everything else, such as
computing. These layers are small, so messages take most of the step.

Try breaking it, in a copy (cp playground/manual_fully_sharded.py playground/broken.py):
  1. Comment out the forward hook with `self.free`. Which number of the output changes?
  2. Give the optimizer `model.parameters()`. Is there an error? How does the loss change?
  3. Seed with `args.seed + rank` before `model = ...`. Which rank's parameters are trained?

Now write it yourself, without hooks: gather_layer.py in playground/exercises/.

The next lesson, fully_sharded_data_parallel.py, leaves this to PyTorch.
"""

import math
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders, whole_batch
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.memory import show_memory, show_waiting


def flatten(tensors):
    """Copy tensors into one flat tensor, with zeros at its end, so that n divides its length."""
    parts = [tensor.flatten() for tensor in tensors]
    length = sum(len(part) for part in parts)
    padding = -length % dist.get_world_size()  # the distance to the next multiple of n
    return torch.cat([*parts, parts[0].new_zeros(padding)])


class ShardedLayer:
    """Keeps this rank's shard of a layer, whose parameters have no memory between computations.

    The layer's forward() must use these parameters, and no others. None of them may be frozen.
    """

    def __init__(self, layer, keep_weights=False):
        self.parameters = list(layer.parameters(recurse=False))
        self.whole = flatten([parameter.detach() for parameter in self.parameters])
        # NEW: a copy, which stays when `whole` is freed. The optimizer updates it.
        shard = self.whole.chunk(dist.get_world_size())[dist.get_rank()]
        self.shard = torch.nn.Parameter(shard.clone())
        # As in the previous lesson, the parameters become views. Autograd saves some of these views
        # for backward(). They share the memory of `whole`, so after the next gather() they have the
        # right numbers again. Autograd does not notice that the numbers were away, because a
        # parameter keeps its own version number when its .data is replaced.
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            parameter.data = self.whole[start:end].view(parameter.shape)
            start = end
        self.bytes = self.whole.nbytes
        self.missing = len(self.parameters)  # how many gradients of a step are not there yet
        self.free()
        # NEW: the four moments. These hooks return nothing, because PyTorch would use what a hook
        # returns in place of the layer's inputs, output or gradients.
        layer.register_forward_pre_hook(self.gather)
        if not keep_weights:
            layer.register_forward_hook(self.free)
            layer.register_full_backward_pre_hook(self.gather)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.count_gradient)

    def gather(self, *_):  # *_: what PyTorch passes to each hook, which is not needed here
        """Give `whole` its memory back, and fill it with the shards of all ranks."""
        if self.missing < len(self.parameters):
            raise RuntimeError("a parameter got no gradient, but others of its layer did")
        self.whole.untyped_storage().resize_(self.bytes)
        # detach: a message has only numbers, and no autograd graph.
        dist.all_gather_into_tensor(self.whole, self.shard.detach())

    def free(self, *_):
        """Free the memory of `whole`, so that its views have no numbers until the next gather()."""
        self.whole.untyped_storage().resize_(0)

    def count_gradient(self, _):
        """After the last gradient of the layer, average all of them and free the parameters."""
        self.missing -= 1
        if self.missing == 0:
            self.average_gradients()
            self.free()
            self.missing = len(self.parameters)

    def average_gradients(self):
        """Give the shard its mean gradient, and free the gradients of the whole parameters."""
        gradients = flatten([parameter.grad for parameter in self.parameters])
        gradients /= dist.get_world_size()  # the sum over the ranks is then the mean
        mean = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(mean, gradients)
        # Add the gradient of an earlier backward() in the same step, if there was one.
        if self.shard.grad is not None:
            mean += self.shard.grad
        self.shard.grad = mean
        for parameter in self.parameters:
            parameter.grad = None


def shard_layers(model, keep_weights=False):
    """Shard each layer that has parameters. Returns the shards of this rank."""
    names = list(model.named_parameters(remove_duplicate=False))
    if len(names) > len(list(model.parameters())):
        raise ValueError("two layers share a parameter, which ShardedLayer does not support")
    # The images need no gradient, and PyTorch 2.9 warns about that. The hook runs all the same.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    shards = []
    for layer in model.modules():
        if list(layer.parameters(recurse=False)):
            shards.append(ShardedLayer(layer, keep_weights).shard)
    return shards


def equal_batches(test_set, rank, world_size):
    """Return a loader of this rank's test images, with as many batches as on all other ranks."""
    batches = torch.arange(len(test_set)).tensor_split(math.ceil(len(test_set) / 1000))
    own_batches = [batch[rank::world_size].tolist() for batch in batches]
    return DataLoader(test_set, batch_sampler=own_batches, collate_fn=whole_batch)


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
            loss.backward()  # NEW: averages the gradients, layer by layer
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch. Then show the messages of a step."""
    rank, device = join(args)
    meet(args)  # guard rail: stops if the ranks have different flags
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args, rank, world_size)
    # NEW: forward() gathers, so all ranks must call it the same number of times, also in a test.
    test_loader = equal_batches(test_loader.dataset, rank, world_size)
    # NEW: equal on all ranks, because each rank keeps a shard of the parameters that it draws.
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    shards = shard_layers(model, args.keep_weights)
    torch.manual_seed(args.seed + rank)
    # NEW: the optimizer gets the shards, because model.parameters() have no memory and no gradients
    # when it makes its step.
    optimizer = torch.optim.Adam(shards, lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(model, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    batch = next(iter(train_loader))
    show_memory(3, model, optimizer, *batch, args.keep_weights)
    show_waiting(model, *batch)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    parser.add_argument("--keep_weights", action="store_true", help="free layers in backward()")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
