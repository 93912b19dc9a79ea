"""DataParallel: one process that uses several GPUs of one machine.

Run it:
    python playground/data_parallel.py                   # all GPUs of this machine
    python playground/data_parallel.py --by hand -g 2    # two replicas, also on a CPU

Both print the same numbers as `single_gpu.py`, up to rounding (times differ):
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.52 s  115,200 images/s

One line wraps the model in `nn.DataParallel`. In each step, this copies the model from the first
GPU to all others, and gives each GPU its part of the batch. One thread for each GPU computes the
outputs, which are gathered on the first GPU, and `backward()` adds up the gradients there.

Older code often uses `nn.DataParallel`, but it is obsolete: `DistributedDataParallel`, with a
process for each GPU, is faster. The threads of one process run Python one at a time (because of
Python's global interpreter lock, GIL), the first GPU does more than the others, and the model is
copied in every step. Skip this lesson, unless your project has `DataParallel`.

Without a GPU, `nn.DataParallel` does nothing. `--by hand` does the work itself, with a replica
(copy) of the model on each GPU, or with any number of replicas on a CPU.

Read the code down to the line "Unchanged from single_gpu.py". What has changed since then:
    git diff -w --patience --no-index playground/{single_gpu,data_parallel}.py

Try breaking it, in a copy (`cp playground/data_parallel.py playground/broken.py`):
  1. Print `list(model.state_dict())` at the end of train, and run it with `--by hand`. How do these
     keys differ from those of the model inside, `model.module`?
  2. In `compute`, write `replica(part.to(device))` in place of `functional_call(...)`, and run it
     with `--by hand`. The loss no longer falls. Where are the gradients?

Builds on: single_gpu.py
The next lesson, `manual_data_parallel.py`, trains with one process for each GPU.
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
from torch.utils.data import DataLoader, RandomSampler
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # find common/ from any folder
from common import flags
from common.data import fetch, load, whole_batch
from common.models import make_model


class Replicas(nn.Module):
    """Computes a batch in parts, one part with each replica of a model, as nn.DataParallel does.

    Args:
        module: the model, on the first of the devices. It must have no buffers (tensors that are
            not trained, as those of batch norm), because the replicas would change their own.
        devices: where the replicas compute, one for each part of a batch.
    """

    def __init__(self, module, devices):
        super().__init__()
        if list(module.buffers()):
            raise ValueError("a model with buffers, such as batch norm's, needs nn.DataParallel")
        self.module = module
        self.devices = devices
        # functional_call runs a module with other parameters in place of its own. So two threads
        # need two modules. These are in a plain list, which hides them from the optimizer.
        self.replicas = [copy.deepcopy(module).to(device) for device in devices]
        self.threads = ThreadPoolExecutor(len(devices))

    def compute(self, replica, part, device, grad_enabled, autocast):
        """Compute one part of the batch on one device, in a thread of its own."""
        torch.set_grad_enabled(grad_enabled)  # each thread has its own settings
        # NEW: the replica computes with copies of the model's parameters. autograd records the
        # copying, so backward() adds up the gradients of all copies in the model's parameters.
        parameters = {}
        for name, parameter in self.module.named_parameters():
            parameters[name] = parameter.to(device, copy=True)
        for mine, theirs in zip(replica.modules(), self.module.modules(), strict=True):
            mine.training = theirs.training  # a part of a model may be in eval()
        with torch.autocast(part.device.type, **autocast):
            return functional_call(replica, parameters, part.to(device))

    def forward(self, images):
        """Turn images, (N, 1, 28, 28), on the first device into logits, (N, 10), there."""
        parts = images.chunk(len(self.devices))  # fewer than there are devices, if N is small
        kind = images.device.type
        autocast = {"dtype": torch.get_autocast_dtype(kind)}
        autocast["enabled"] = torch.is_autocast_enabled(kind)
        settings = (torch.is_grad_enabled(), autocast)
        results = []
        for replica, part, device in zip(self.replicas, parts, self.devices, strict=False):
            # NEW: a thread for each part. submit() returns at once, and result() waits for its end.
            results.append(self.threads.submit(self.compute, replica, part, device, *settings))
        outputs = [result.result() for result in results]
        return torch.cat([output.to(self.devices[0]) for output in outputs])


def main():
    """Read the flags, make sure that the data is there, and train."""
    parser = flags.training(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    parser.check_gpus(args.device, args.gpus, "-g")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


def train(args):
    """Let the model use several devices, and train."""
    device = torch.device(args.device)
    train_loader, test_loader = loaders(args)
    torch.manual_seed(args.seed)
    model = make_model(args).to(device)
    # NEW: from here on, model(images) uses all devices. The training loop does not change.
    if args.by == "hand":
        model = Replicas(model, choose_devices(args))
    elif args.device != "cpu":
        model = nn.DataParallel(model, device_ids=list(range(args.gpus)))
    else:
        print("nn.DataParallel does nothing without a GPU: try --by hand -g 2", file=sys.stderr)
    # fused=True is faster. eps makes the lessons' digits equal: in your project, leave it out.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)


def choose_devices(args):
    """Return the first GPUs, or the CPU as many times."""
    if args.device == "cpu":
        return ["cpu"] * args.gpus
    return [f"{args.device}:{number}" for number in range(args.gpus)]


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    gpus = max(1, torch.accelerator.device_count())
    add("-g", "--gpus", type=flags.positive, default=gpus, help="replicas; default: one per GPU")
    add("--by", choices=["torch", "hand"], default="torch", help="torch: nn.DataParallel")


# ---------- Unchanged from single_gpu.py ----------
# You know what follows: loaders(), fit_epoch() and run_epoch(). If you copy this, copy them, too.


def loaders(args):
    """Return a DataLoader of the training images, and one of the test images."""
    dtype = torch.float64 if args.double else torch.float32
    train_set, test_set = load(args.dataset, args.data_dir, dtype)
    # These data sets return whole batches. Yours does not: leave collate_fn out; set num_workers.
    options = {"collate_fn": whole_batch, "pin_memory": args.device != "cpu"}
    sampler = RandomSampler(train_set, generator=torch.Generator())
    # drop_last leaves out an incomplete last batch, which several ranks could not divide equally.
    train_loader = DataLoader(
        train_set, args.batch_size, sampler=sampler, drop_last=True, **options
    )
    test_loader = DataLoader(test_set, 1000, **options)
    return train_loader, test_loader


def fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args):
    """Train for one epoch, test, and print a line."""
    # Each epoch has an order of its own. Lesson 6 has the same one, because DistributedSampler
    # shuffles with seed + epoch, too.
    train_loader.sampler.generator.manual_seed(args.seed + epoch)
    start = time.perf_counter()
    title = f"epoch {epoch + 1}/{args.epochs}"
    bar = tqdm(train_loader, title, leave=False, disable=None)  # shown in a terminal only
    loss, correct, images = run_epoch(model, bar, device, optimizer)
    seconds = time.perf_counter() - start
    speed = len(train_loader) * args.batch_size / seconds
    _, test_correct, test_images = run_epoch(model, test_loader, device)
    digits = 12 if args.double else 4
    print(
        f"{title}  loss {loss / images:.{digits}f}"
        f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
        f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
        flush=True,
    )


def run_epoch(model, loader, device, optimizer=None):
    """Train, or with no optimizer, test. Returns sums: loss, correct, number of images."""
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
    return sums.tolist()


if __name__ == "__main__":
    main()
