r"""Sending less: what to do if the network between the nodes is slow.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/replicated/sending_less.py

By default this is DDP, so it prints the same numbers as `single_gpu.py`, up to rounding:
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  1.43 s  41,881 images/s

In each step of DDP, each of two ranks sends as many bytes as the gradients have: 236,840 for the
default model. At 10 megabits a second this takes 0.19 s, while computing takes about a millisecond.
So let the ranks send seldom: each trains alone for 50 steps (`--every`), and then they agree on
their parameters. With `--by local` they take the mean, and with `--by diloco` a second optimizer
makes a step towards it. This simulates two such nodes (`run/README.md`):
    GPUS=1 BANDWIDTH=10mbit run/rehearse_two_nodes.sh \
        playground/replicated/sending_less.py --epochs 1

On them, an epoch of MNIST takes, with these flags at the end of the command:
                                   seconds    MB sent    test
    (no flag)                      93.2       111.7      93.96%
    --by local                     2.2        2.4        93.38%
    --by diloco                    2.2        2.4        93.40%
    --batch_size 1280 --lr 1e-2    9.1        11.0       93.59%

The last row is the control, which needs no new idea: with ten times as many images in a step, there
are a tenth of the messages, and the learning rate must be higher. The section "A slow network" of
`playground/pages/measured.md` has longer runs, and a picture of them.

Try breaking it, in a copy beside it:
  1. Write `parameter - agreed` in `DiLoCo.agree()`. Where does the model go?
  2. DDP may also send fewer bytes in each step. Import `bf16_compress_hook` from
     `torch.distributed.algorithms.ddp_comm_hooks.default_hooks`, and below the line that makes DDP
     write `model.register_comm_hook(None, bf16_compress_hook)`. How does the loss change?
Builds on: overlapped_data_parallel.py
The next lesson, `sharded_data.py`, reads data that does not fit in memory.
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
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_model


class LocalSteps:
    """A loader of training batches. Each rank trains alone, and calls agree() after every few.

    In between, the ranks send nothing, so their models drift apart. (Each also keeps an Adam of its
    own, whose averages are never sent.) They also agree after the last batch of an epoch, to test
    one model (but for batch norm's buffers: average those, too). If you leave a loop early, as at a
    number of steps, call agree() behind it. Batches are counted, not the optimizer's steps, because
    a rank may skip a step, as GradScaler does. (PyTorch has this, too: PostLocalSGDOptimizer.)
    """

    def __init__(self, loader, agree, every):
        self.loader = loader
        self.sampler = loader.sampler
        self.agree = agree
        self.every = every

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for number, batch in enumerate(self.loader, start=1):
            yield batch
            # When the loop asks for the next batch, it has trained on this one.
            if number % self.every == 0 or number == len(self):
                self.agree()  # NEW: agree on parameters, not on gradients


@torch.no_grad()
def average(tensors):
    """Replace each tensor with its mean over the ranks, in one message."""
    message = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(message)
    message /= dist.get_world_size()
    sizes = [tensor.numel() for tensor in tensors]
    for tensor, mean in zip(tensors, message.split(sizes), strict=True):
        tensor.copy_(mean.view_as(tensor))


def train(args):
    """Train as one of the ranks, and print what this node has sent."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args, rank, dist.get_world_size())
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)  # the same on all ranks, because they have the same seed
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    if args.sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    # NEW: the ranks agree after some of the optimizer's steps, or DDP sends in each backward().
    parameters = list(model.parameters())
    if args.by == "local":
        # With plain SGD (--sgd) and --every 1, this gives the same numbers as DDP, up to rounding,
        # because a step is linear in the gradient. With Adam, it does not.
        train_loader = LocalSteps(train_loader, partial(average, parameters), args.every)
    elif args.by == "diloco":
        outer = DiLoCo(parameters, args.outer_lr, args.outer_momentum)
        train_loader = LocalSteps(train_loader, outer.agree, args.every)
    else:
        model = DistributedDataParallel(model)
    before = bytes_sent()
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    sent = bytes_sent() - before
    if rank == 0 and sent:
        print(f"bytes sent by this node: {sent / 1e6:.2f} MB", flush=True)
    # DDP refers to the group, so delete DDP first. Otherwise the process may hang.
    del model
    dist.destroy_process_group()


class DiLoCo:
    """Local SGD with a second, outer optimizer (https://arxiv.org/abs/2311.08105).

    The ranks do not continue from the mean of their parameters. The parameters on which they last
    agreed, minus this mean, are the gradient for a step of the outer optimizer, whose momentum
    keeps the direction of earlier steps.
    """

    def __init__(self, parameters, outer_lr, outer_momentum):
        self.parameters = parameters
        # NEW: the parameters on which the ranks last agreed. Only the outer optimizer moves them.
        self.agreed = [parameter.detach().clone() for parameter in parameters]
        nesterov = outer_momentum > 0
        self.outer = torch.optim.SGD(self.agreed, outer_lr, outer_momentum, nesterov=nesterov)

    @torch.no_grad()
    def agree(self):
        """Make a step of the outer optimizer, the same on all ranks, and continue from there."""
        for agreed, parameter in zip(self.agreed, self.parameters, strict=True):
            # NEW: an optimizer moves against the gradient, so the gradient points back.
            agreed.grad = agreed - parameter
        average([agreed.grad for agreed in self.agreed])
        # NEW: agreed -= outer_lr * (agreed - mean of the parameters), and the same with momentum.
        # With outer_lr 1 and without momentum, this is the mean, as in local SGD.
        self.outer.step()
        for agreed, parameter in zip(self.agreed, self.parameters, strict=True):
            parameter.copy_(agreed)


# You can stop here: what follows only counts bytes and adds flags.


def bytes_sent():
    """Return how many bytes this node has sent to other nodes, as Linux counts them.

    These are the bytes of all programs. A simulated node runs no others. (0 on other systems.)
    """
    counts = Path("/proc/net/dev")
    sent = 0
    if counts.exists():
        for line in counts.read_text().splitlines()[2:]:  # after two lines of headings
            interface, numbers = line.split(":")
            if interface.strip() != "lo":  # which does not leave the node
                sent += int(numbers.split()[8])  # the eight before are about receiving
    return sent


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    ways = ["ddp", "local", "diloco"]
    add("--by", choices=ways, default="ddp", help="how the ranks agree")
    add("--every", type=flags.positive, default=50, help="steps between messages (local, diloco)")
    add("--outer_lr", type=flags.number, default=0.7, help="rate of DiLoCo's outer optimizer")
    add("--outer_momentum", type=flags.number, default=0.9, help="momentum of the outer optimizer")
    add("--sgd", action="store_true", help="plain SGD in place of Adam")


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
