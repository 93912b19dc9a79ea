"""Model parallelism: one model on two devices, with and without pipelining.

A model that is too large for one GPU can be split. This lesson puts its first half, stage1, on one
GPU and its second half, stage2, on another. The output of stage1 (the activations) is copied to the
second GPU, and the gradient of the activations is copied back. This saves memory, not time, because
one GPU always waits for the other.

With --pipelined, each batch is split into smaller parts, the micro-batches. The first GPU computes
a micro-batch while the second GPU computes the one before. A single process can do this, because
each GPU works through a queue of operations, which CUDA calls a stream. Python only puts operations
into the queues and does not wait for their results.

How long does each GPU wait? Suppose that every stage takes one turn for a micro-batch, and that
messages take no time. With p stages and m micro-batches, the last stage starts p - 1 turns after
the first one. So the forward passes take m + p - 1 turns. Each GPU computes in m of them and is
idle in p - 1 of them, which is (p-1)/(m+p-1) of the time. The same holds for the backward passes.
This idle part of the time is called the bubble (GPipe, https://arxiv.org/abs/1811.06965).

Run it:
    python playground/model_parallel.py
    python playground/model_parallel.py --pipelined --micro_batches 8 --plot timeline.png
    python playground/model_parallel.py --devices cuda:0 cpu

It uses two GPUs if there are two. Otherwise both stages are on one device, so pipelining only adds
work.

It prints the same numbers as single_gpu.py (times will differ):
    stage1 on cpu, stage2 on cpu
    epoch 1/3  loss 0.3960  train 88.26%  test 93.96%  0.55 s  109,000 images/s

It ends with a timeline of one step. A digit is the forward pass of the micro-batch with that
number, a letter is its backward pass (a: micro-batch 0), and a dot means waiting. Autograd goes
backwards, so the last micro-batch comes first. This is a CPU, with --pipelined --micro_batches 4
--width 1024 --batch_size 512. Only one stage computes at a time:
   stage1 |00..1..2222....3333..............dddddddd.........cccccccccc.....bbbbbbbb.......aaaaaaaa|
   stage2 |..00.11....2222....3333.....ddddd........cccccccc...........bbbbb.........aaaa..........|
On two GPUs, the stages can overlap. Without the cost of messages, a timeline would look like this:
    stage1 |000111222333......dddcccbbbaaa|
    stage2 |...000111222333dddcccbbbaaa...|

Try breaking it, in a copy (cp playground/model_parallel.py playground/broken.py):
  1. Leave out `.to(devices[1])` after stage1. What does PyTorch say with two GPUs, and why does it
     say nothing if there is only the CPU?
  2. In run_epoch, split logits and labels with tensor_split, as forward splits the images. Then add
     up the mean losses of the micro-batches. How many times too large are the gradients, and why
     does Adam hardly react to that?

The next lesson, manual_pipeline.py, has a process for each stage.
"""

import sys
import time
from pathlib import Path

import torch
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import bar, epoch_line
from measure.timeline import show, watch_modules


def forward(model, images, devices, micro_batches):
    """Run both stages, each on its own device. Returns the logits, (N, 10), on the second one."""
    images = images.to(devices[0], non_blocking=True)
    logits = []
    # NEW: without pipelining, there is one micro-batch, the whole batch. On GPUs, Python only
    # queues the operations in this loop. So the first GPU can compute the next micro-batch while
    # the second GPU computes this one.
    for micro_batch in images.tensor_split(micro_batches):
        activations = model.stage1(micro_batch).to(devices[1])
        logits.append(model.stage2(activations))
    # The loss is computed once for the whole batch, so micro-batches do not change the gradients.
    # (Batch norm would, because it uses the mean of a micro-batch.)
    return torch.cat(logits)


def run_epoch(model, loader, devices, micro_batches, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over all images: the loss, the number classified correctly, the number of
    images.
    """
    model.train(optimizer is not None)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=devices[1])
    for images, labels in loader:
        labels = labels.to(devices[1], non_blocking=True)  # NEW: the loss is computed after stage2
        with torch.set_grad_enabled(model.training):
            logits = forward(model, images, devices, micro_batches)
            loss = F.cross_entropy(logits, labels)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()  # NEW: autograd copies gradients between the devices by itself
            optimizer.step()
        sums[0] += loss.detach() * len(labels)
        sums[1] += (logits.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    return sums.tolist()


def observe(model, images, labels, devices, micro_batches, plot):
    """Show when each stage computes: first with the micro-batches, then with the whole batch."""
    labels = labels.to(devices[1])

    def step(count):
        logits = forward(model, images, devices, count)
        F.cross_entropy(logits, labels).backward()

    stages = [model.stage1, model.stage2]
    # The timelines. A key has the name of what runs the stages, and the number of micro-batches.
    steps = {}
    steps["one process", micro_batches] = watch_modules(stages, devices, step, micro_batches)
    if micro_batches > 1:
        steps["one process", 1] = watch_modules(stages, devices, step, 1)
    show(steps, ["stage1", "stage2"], plot)
    if devices[0] == devices[1]:
        print(f"Both stages are on {devices[0]}, in one process, so nothing can overlap.")
        print("With a process for each stage, the stages do overlap:")
        print(
            "torchrun --standalone --nproc-per-node 2 playground/pipeline_parallel.py", flush=True
        )


def train(args):
    """Train and test, and print one line for each epoch. Then show when each stage computes."""
    devices = [torch.device(name) for name in args.devices]
    micro_batches = args.micro_batches if args.pipelined else 1
    train_loader, test_loader = loaders(args)
    torch.manual_seed(args.seed)
    model = make_model(args)
    model.stage1.to(devices[0])  # NEW: each stage has its own device
    model.stage2.to(devices[1])
    print(f"stage1 on {devices[0]}, stage2 on {devices[1]}", flush=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader)
        trained = run_epoch(model, progress, devices, micro_batches, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(model, test_loader, devices, micro_batches)
        print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    images, labels = next(iter(train_loader))
    observe(model, images, labels, devices, micro_batches, args.plot)


@explained  # guard rail: explains errors
def main():
    """Read the flags, make sure that the data is there, and train."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ["cpu"] + [f"cuda:{number}" for number in range(gpus)]
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--devices", nargs=2, choices=names, help="for stage1 and stage2; default: two GPUs, if any"
    )
    add("--pipelined", action="store_true", help="split each batch into micro-batches")
    add("--micro_batches", type=int, default=4, help="micro-batches in a batch, with --pipelined")
    add("--plot", metavar="PNG", help="draw the timeline into this file")
    add("--batch_size", type=int, default=128, help="images in a step")
    args = parser.parse_args()
    if args.devices is None and args.device == "cuda" and gpus > 1:
        args.devices = ["cuda:0", "cuda:1"]
    elif args.devices is None:
        args.devices = [args.device, args.device]
    check(parser, args)  # guard rail: refuses impossible flags
    most = args.batch_size
    if args.pipelined and args.micro_batches > most:
        wrong = f"--micro_batches {args.micro_batches}: a batch of {most} images has at most {most}"
        parser.error(f"{wrong}: use --micro_batches {most}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
