"""Sharded parameters (ZeRO 3), by hand: each rank stores 1/n of every layer.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/sharded/manual_fully_sharded.py

It prints the same numbers as `single_gpu.py`, up to rounding (with `--double` all twelve digits
agree), and then what rank 0 holds: 8 bytes for each of 59,210 parameters. DDP would hold 16:
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  7.11 s  8,425 images/s
    rank 0 holds   118,420 bytes of the parameters' shards
    rank 0 holds         0 bytes of whole layers
    rank 0 holds   118,420 bytes of gradients
    rank 0 holds   236,840 bytes of optimizer state

This is stage 3 of ZeRO: 16/n bytes for a parameter. A layer needs all of its parameters to compute,
so the ranks gather them just before, and free them right after. A function that PyTorch calls at
such a moment is a hook. Four moments are enough:
    before a layer's forward()               gather()
    after it                                 free()
    before backward() reaches the layer      gather()
    when the layer's last gradient is ready  average_gradients(), then free()

With four layers, a step has 8 all_gathers and 4 reduce_scatters. In a ring these take 1.5 times the
bytes of DDP's all_reduce. With `--keep_weights`, a layer stays whole from `forward()` to
`backward()`. So 4 all_gathers are enough, and in a ring a step takes as many bytes as DDP's. Here
nothing computes while a message travels. On GPUs, FSDP (the next lesson) gathers a layer while
another one computes (`playground/pages/figures/fsdp.svg` shows which layers are whole when).

Try breaking it, in a copy beside it:
  1. Comment out the forward hook with `self.leave`. Which number of the output changes?
  2. Give the optimizer `model.parameters()`. Is there an error? How does the loss change?
  3. Seed with `args.seed + rank` before `model = ...`. Which rank's parameters are trained?

Now write it yourself, without hooks: `gather_layer.py` in `playground/exercises/`.
Builds on: sharded_optimizer.py
The next lesson, `fully_sharded_data_parallel.py`, leaves this to PyTorch.
"""

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


class ShardedLayer:
    """Keeps this rank's shard of a layer, whose parameters have no memory between computations.

    Reading a parameter then crashes Python, so state_dict() is refused. Each parameter must get a
    gradient in every backward(), have the dtype of its layer, belong to one layer only, and be used
    in that layer's forward() only. (nn.MultiheadAttention uses its out_proj's.) The optimizer must
    be elementwise, as SGD and Adam are (not Muon or Adafactor). clip_grad_norm_() would find the
    norm of this rank's shards only. To clip, sum the squares of all `shard.grad` over the ranks
    first.
    """

    def __init__(self, layer, keep_weights=False):
        self.parameters = list(layer.parameters(recurse=False))
        if any(each.numel() and not each.untyped_storage().nbytes() for each in self.parameters):
            raise ValueError("a parameter belongs to two layers, of which one is sharded already")
        self.whole = flatten([parameter.detach() for parameter in self.parameters])
        # NEW: a copy, which stays when `whole` is freed. The optimizer updates it.
        shard = self.whole.chunk(dist.get_world_size())[dist.get_rank()]
        self.shard = torch.nn.Parameter(shard.clone())
        # As in the previous lesson, the parameters become views of `whole`. Autograd saves some of
        # these views for backward(), and the next gather() fills them again. Autograd raises an
        # error if a saved tensor has been changed in place, but it counts changes for each
        # parameter, and writing into `whole` does not count.
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            parameter.data = self.whole[start:end].view(parameter.shape)
            start = end
        self.bytes = self.whole.nbytes
        self.gradients_due = len(self.parameters)  # gradients that this step still lacks
        self.free()
        # NEW: the four moments. These hooks return nothing, because PyTorch would use what a hook
        # returns in place of the layer's inputs, output or gradients.
        layer.register_forward_pre_hook(self.check)
        layer.register_forward_pre_hook(self.gather)
        if not keep_weights:
            layer.register_forward_hook(self.leave)
            layer.register_full_backward_pre_hook(self.gather)
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self.count_gradient)
        layer.register_state_dict_pre_hook(self.refuse)
        layer.register_load_state_dict_pre_hook(self.refuse)

    def refuse(self, *_):
        """Refuse state_dict() and load_state_dict(), because the parameters have no memory."""
        raise RuntimeError("the layer is sharded: load a state before, and save the shards")

    def check(self, *_):
        """Refuse to continue if the last backward() did not compute all gradients of the layer."""
        if self.gradients_due < len(self.parameters):
            raise RuntimeError("a parameter of this layer got no gradient in the last backward()")

    def gather(self, *_):  # *_: what PyTorch passes to each hook, which is not needed here
        """Give `whole` its memory back, and fill it with the shards of all ranks."""
        self.whole.untyped_storage().resize_(self.bytes)
        # detach: a message has only numbers, and no autograd graph.
        dist.all_gather_into_tensor(self.whole, self.shard.detach())

    def leave(self, layer, inputs, output):
        """Free the parameters after forward()."""
        if not isinstance(output, (torch.Tensor, tuple)):  # no hook would see its gradient
            raise TypeError("a layer with parameters of its own must return a tensor or a tuple")
        self.free()

    def free(self):
        """Free the memory of `whole`, so that its views have no numbers until the next gather()."""
        self.whole.untyped_storage().resize_(0)

    def count_gradient(self, _):
        """After the last gradient of the layer, average all of them and free the parameters."""
        self.gradients_due -= 1
        if self.gradients_due == 0:
            self.average_gradients()
            self.free()
            self.gradients_due = len(self.parameters)

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
    """Shard each module that has parameters of its own. Returns the ShardedLayers."""
    # PyTorch 2.9 warns that the images need no gradient. The hook runs all the same.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    layers = []
    for module in model.modules():
        if list(module.parameters(recurse=False)):
            layers.append(ShardedLayer(module, keep_weights))
    return layers


def train(args):
    """Shard a model, train it, and show what rank 0 holds."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    # NEW: the same seed on all ranks, because each keeps a shard of the same random numbers.
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    layers = shard_layers(model, args.keep_weights)
    torch.manual_seed(args.seed + rank)
    # NEW: the optimizer gets the shards, because model.parameters() have no memory and no gradients
    # when it makes its step.
    shards = [layer.shard for layer in layers]
    optimizer = torch.optim.Adam(shards, lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    if rank == 0:
        show_bytes(layers, optimizer)
    dist.destroy_process_group()


# You can stop here: what follows prints, and reads flags.
def show_bytes(layers, optimizer):
    """Print the bytes that rank 0 holds."""
    state = 0
    for averages in optimizer.state.values():
        state += averages["exp_avg"].nbytes + averages["exp_avg_sq"].nbytes
    held = {
        "the parameters' shards": sum(layer.shard.nbytes for layer in layers),
        "whole layers": sum(layer.whole.untyped_storage().nbytes() for layer in layers),
        "gradients": sum(layer.shard.grad.nbytes for layer in layers),
        "optimizer state": state,
    }
    for name, nbytes in held.items():
        print(f"rank 0 holds {nbytes:>9,} bytes of {name}", flush=True)


def add_flags(parser):
    """Add the flag that only this lesson has."""
    keep = "keep gathered layers until backward(): more memory, fewer messages"
    parser.add_argument("--keep_weights", action="store_true", help=keep)


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
