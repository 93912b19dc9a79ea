"""A sharded optimizer (ZeRO 2), by hand: each rank keeps 1/n of gradients and optimizer state.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/sharded/sharded_optimizer.py

It prints the same numbers as `single_gpu.py`, up to rounding (with `--double` all twelve digits
agree), and then what rank 0 holds:
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  2.97 s  20,163 images/s
    rank 0 holds   236,840 bytes of parameters, with DDP 236,840
    rank 0 holds   118,420 bytes of gradients, with DDP 236,840
    rank 0 holds   236,840 bytes of optimizer state, with DDP 473,680

DDP replicates everything. With Adam in float32, every parameter costs each rank 16 bytes: 4 for its
value, 4 for its gradient, and 8 of optimizer state, which are Adam's two moments. ZeRO
(https://arxiv.org/abs/1910.02054) shards them over the n ranks in three stages: first the optimizer
state, which leaves 8 + 8/n bytes; then the gradients, too, as here (4 + 12/n); then the parameters
as well (16/n, the next lesson; `playground/pages/figures/holds.svg`).

A bucket is one flat tensor with all parameters of a layer. It has n shards of equal length, and
each rank updates one of them. During `backward()`, a reduce_scatter gives each rank the mean
gradient of its shard. Then the rank's optimizer updates the shard, and an all_gather sends the new
shards to all ranks. With `overlap`, the next `forward()` waits for it, layer by layer. In a ring,
the two send as many bytes as DDP's all_reduce (`playground/pages/sharding.md`).

Other variants: stage 1, such as `ZeroRedundancyOptimizer`, keeps the whole gradients. With 16-bit
parameters, as in Megatron and DeepSpeed, gradients are added up in a float32 tensor (`main_grad`),
and the optimizer gets a float32 copy of the shard, which `step()` rounds into the shard.

Try breaking it, in a copy beside it:
  1. Give `make_optimizer` each `bucket.flat`, not `bucket.shard`. What is trained now? Which line
     of the output shows it?
  2. Write `bucket.handle = None` in place of the all_gather. Which parameters does each rank train
     then?
  3. Comment out the two lines of the broadcast, and write `torch.manual_seed(args.seed + rank)`
     before `model = ...`. Which parameters do the ranks have after the first step?

Now write it yourself, for any model: `shard_optimizer.py` in `playground/exercises/`.
Builds on: overlapped_data_parallel.py
The next lesson, `manual_fully_sharded.py`, shards the parameters as well.
"""

import os
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


def flatten(tensors):
    """Copy tensors into one flat tensor, with zeros at its end, so that n divides its length."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    padding = -len(flat) % dist.get_world_size()  # the distance to the next multiple of n
    return torch.cat([flat, flat.new_zeros(padding)])


class Bucket:
    """The parameters of a layer, as views of one flat tensor, and this rank's shard of it."""

    def __init__(self, layer, parameters):
        self.parameters = parameters
        # NEW: from here on, the parameters share the memory of the flat tensor.
        self.flat = flatten([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = self.flat[start:end].view(parameter.shape)
            start = end
            parameter.register_post_accumulate_grad_hook(self.note)
        self.shard = self.flat.chunk(dist.get_world_size())[dist.get_rank()]
        self.complete = set()  # the parameters whose gradients are complete in this step
        self.handle = None  # of the message that travels
        self.before = None  # the next layer's bucket, which is complete before this one
        # NEW: forward() waits for the shards of the other ranks, and so do saving and loading.
        layer.register_forward_pre_hook(self.wait, prepend=True)  # before all other hooks
        layer.register_state_dict_pre_hook(self.wait)
        layer.register_load_state_dict_pre_hook(self.wait)

    def note(self, parameter):
        """Note a complete gradient. After the last one, start to send the gradients."""
        # If no gradient is complete yet, the message is the all_gather of the last step.
        if self.handle is not None and not self.complete:
            raise RuntimeError("used outside its layer's forward(), which overlap forbids")
        if parameter in self.complete:
            raise RuntimeError("call step() and zero_grad() after each backward()")
        self.complete.add(parameter)
        if len(self.complete) == len(self.parameters):
            gradients = flatten([each.grad for each in self.parameters])
            gradients /= dist.get_world_size()  # the sum over the ranks is then the mean
            for each in self.parameters:
                each.grad = None  # NEW: a rank keeps the mean only, and of it only its shard
            # An optimizer takes any tensor, but reads its .grad, which backward() does not set.
            self.shard.grad = torch.empty_like(self.shard)
            self.handle = dist.reduce_scatter_tensor(self.shard.grad, gradients, async_op=True)
            # NEW: a message keeps the gradients that it sends, so let two of them travel at most.
            if self.before is not None and self.before.complete:
                self.before.wait()

    def wait(self, *_):
        """Wait for the message that travels, if there is one."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None


class ShardedOptimizer:
    """Updates all parameters of a model, but keeps only this rank's shards of the optimizer state.

    All parameters have one weight decay, and each that is not frozen must get one gradient in every
    step, on all ranks in the same order. The optimizer must be elementwise, as SGD and Adam are
    (not Muon or Adafactor). Give a scheduler `self.optimizer`. clip_grad_norm_() finds no
    gradients, and clips nothing: do so inside step(), by the squares of all shards and ranks. With
    `overlap`, step() returns while the new parameters still travel. Then only forward() of a layer
    and state_dict() may read them, and no average of parameters (EMA).
    """

    def __init__(self, model, make_optimizer, overlap=False):
        self.model = model
        self.overlap = overlap
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if len({parameter.dtype for parameter in trained}) > 1:
            raise ValueError("all parameters must have the same dtype, that of the flat tensors")
        self.buckets = []
        for layer in model.modules():
            own = [each for each in layer.parameters(recurse=False) if each.requires_grad]
            if own:
                self.buckets.append(Bucket(layer, own))
        if sum(len(bucket.parameters) for bucket in self.buckets) > len(trained):
            raise ValueError("a parameter belongs to two layers, and has one bucket only")
        for bucket, next_bucket in pairwise(self.buckets):
            bucket.before = next_bucket  # backward() begins with the last layer
        # NEW: the optimizer gets only this rank's shards.
        self.optimizer = make_optimizer([bucket.shard for bucket in self.buckets])
        self.optimizer.register_state_dict_pre_hook(self.refuse)

    def refuse(self, _):
        """Refuse state_dict(): it has this rank's shard only, so a file would lack the others."""
        raise RuntimeError("this is one shard of the state: ZeroRedundancyOptimizer can save all")

    def zero_grad(self):
        """Free the gradients of the previous step, or of a backward() that was interrupted."""
        for bucket in self.buckets:
            if bucket.complete:
                bucket.wait()
            bucket.complete.clear()
            for tensor in (bucket.shard, *bucket.parameters):
                tensor.grad = None

    def step(self):
        """Update this rank's shards with the mean gradients, and gather the shards of all ranks."""
        self.check()
        for bucket in self.buckets:
            bucket.wait()  # for the mean
        self.optimizer.step()
        for bucket in self.buckets:
            # NEW: the shards of all ranks. An all_gather may work in place: its input may be this
            # rank's part of its output.
            bucket.handle = dist.all_gather_into_tensor(bucket.flat, bucket.shard, async_op=True)
            if not self.overlap:
                bucket.wait()
            bucket.complete.clear()

    def check(self):
        """Refuse to update what the model no longer has, or not all of what it has."""
        known = {parameter for bucket in self.buckets for parameter in bucket.parameters}
        if {each for each in self.model.parameters() if each.requires_grad} - known:
            raise RuntimeError("a layer was unfrozen, or a parameter replaced: make this anew")
        for bucket in self.buckets:
            flat = bucket.flat.untyped_storage().data_ptr()
            if any(each.untyped_storage().data_ptr() != flat for each in bucket.parameters):
                raise RuntimeError("a parameter has left the flat tensor: make this optimizer last")
            if len(bucket.complete) < len(bucket.parameters):
                raise RuntimeError("a parameter has got no gradient in this step")


def train(args):
    """Train with a sharded optimizer, and show what rank 0 holds."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)  # all ranks start with the parameters of rank 0, as with DDP
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    make_optimizer = partial(torch.optim.Adam, lr=args.lr, eps=1e-6, fused=True)
    # NEW: also averages the gradients. Nothing but forward() reads the parameters after a step.
    optimizer = ShardedOptimizer(model, make_optimizer, overlap=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    if rank == 0:
        show_bytes(model, optimizer)
    dist.destroy_process_group()


# You can stop here: what follows only prints.
def show_bytes(model, optimizer):
    """Print the bytes that rank 0 holds, and what it would hold with DDP."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    shards = [bucket.shard for bucket in optimizer.buckets]
    gradients = sum(shard.grad.nbytes for shard in shards)
    state = 0
    for averages in optimizer.optimizer.state.values():
        state += averages["exp_avg"].nbytes + averages["exp_avg_sq"].nbytes
    for name, held, with_ddp in (
        ("parameters", parameters, parameters),
        ("gradients", gradients, parameters),
        ("optimizer state", state, 2 * parameters),
    ):
        print(f"rank 0 holds {held:>9,} bytes of {name}, with DDP {with_ddp:,}", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has: none."""


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), fit_epoch(), run_epoch(), check_flags() and main(). If you copy
# this lesson, copy this, too.


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


def check_flags(parser, args, world_size):
    """Refuse flags that do not fit the number of ranks."""
    parser.check_batch(args.batch_size, world_size)


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
