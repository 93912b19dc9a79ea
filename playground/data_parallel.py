"""DataParallel: one process that uses several GPUs of one machine.

One line wraps the model in nn.DataParallel. In each step it copies the model from the first GPU to
all others, and gives each GPU its part of the batch. One thread for each GPU computes the outputs,
which are gathered on the first GPU. backward() adds up the gradients there.

nn.DataParallel is obsolete, but older code often uses it. It is slow for three reasons. The threads
share one Python interpreter. The first GPU does more than the others. The model is copied in every
step. DistributedDataParallel has replaced it, with a process for each GPU.

Without a GPU, nn.DataParallel does nothing: the model runs as in single_gpu.py. With --by hand,
this file does the work of nn.DataParallel itself: with a replica on each GPU, or with any number of
replicas on a CPU.

Run it:
    python playground/data_parallel.py                   # all GPUs of this machine
    python playground/data_parallel.py --by hand -g 2    # two replicas, also on a CPU

It prints the numbers of single_gpu.py, up to rounding, for any number of replicas (times differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.52 s  115,200 images/s

Try breaking it, in a copy (cp playground/data_parallel.py playground/broken.py):
  1. Print `list(model.state_dict())` at the end of train, and run it with --by hand. How do these
     keys differ from those of the model inside, `model.module`?
  2. In `compute`, write `replica(part)` in place of `functional_call(...)`, and run it with --by
     hand. The loss no longer falls. Where are the gradients?

The next lesson, manual_data_parallel.py, trains with one process for each GPU.
"""

import copy
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import bar, epoch_line


class Replicas(nn.Module):
    """Computes a batch in parts, one part with each replica of a model, as nn.DataParallel does.

    Args:
        module: the model, on the first of the devices. The replicas' buffers, such as the averages
            of batch norm, are not copied back to it.
        devices: where the replicas compute, one for each part of a batch.
    """

    def __init__(self, module, devices):
        super().__init__()
        self.module = module
        self.devices = devices
        # functional_call puts parameters into a module while it computes, so each thread needs a
        # module of its own. A plain list hides these modules from parameters(), so the optimizer
        # does not see them.
        self.replicas = [copy.deepcopy(module) for _ in devices]
        self.threads = ThreadPoolExecutor(len(devices))

    def compute(self, replica, part, device, grad_enabled):
        """Compute one part of the batch on one device, in a thread of its own."""
        torch.set_grad_enabled(grad_enabled)  # each thread has its own setting
        # NEW: the replica computes with copies of the model's parameters. autograd records that
        # they were copied. So backward() passes the gradient of each copy back to the model's
        # parameter, and adds up those of all replicas.
        parameters = {}
        for name, parameter in self.module.named_parameters():
            parameters[name] = parameter.to(device, copy=True)
        replica.train(self.training)
        return functional_call(replica, parameters, part.to(device))

    def forward(self, images):
        """Turn images, (N, 1, 28, 28), on the first device into logits, (N, 10), there."""
        parts = images.chunk(len(self.devices))  # fewer than there are devices, if N is small
        grad_enabled = torch.is_grad_enabled()
        results = []
        for replica, part, device in zip(self.replicas, parts, self.devices, strict=False):
            # NEW: a thread for each part. submit() returns at once, and result() waits for its end.
            results.append(self.threads.submit(self.compute, replica, part, device, grad_enabled))
        outputs = [result.result() for result in results]
        return torch.cat([output.to(self.devices[0]) for output in outputs])


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over all images: the loss, the number classified correctly, the number of
    images.
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
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch."""
    device = torch.device(args.device)
    train_loader, test_loader = loaders(args)  # with the same batches as in single_gpu.py
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    # NEW: from here on, model(images) uses all devices. The training loop does not change.
    if args.by == "hand":
        numbers = range(args.gpus)
        devices = [f"cuda:{number}" if args.device == "cuda" else "cpu" for number in numbers]
        model = Replicas(model, devices)
    elif args.device == "cuda":
        model = nn.DataParallel(model, device_ids=list(range(args.gpus)))
    else:
        print("nn.DataParallel does nothing without a GPU: try --by hand -g 2", file=sys.stderr)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)  # single_gpu.py's order: see the next lesson
        start = time.perf_counter()
        trained = run_epoch(model, bar(train_loader), device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, device)
        print(epoch_line(args, epoch, seconds, trained, tested), flush=True)


@explained  # guard rail: explains errors
def main():
    """Read the flags, make sure that the data is there, and train."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    gpus = max(1, torch.cuda.device_count())
    add("-g", "--gpus", type=int, default=gpus, help="replicas; default: one for each GPU")
    add("--by", choices=["torch", "hand"], default="torch", help="torch: nn.DataParallel")
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--batch_size", type=int, default=128, help="images in a step")
    args = parser.parse_args()
    check(parser, args)  # guard rail: refuses impossible flags
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
