r"""A pipeline with torch.distributed.pipelining, and four of its schedules.

The previous lesson sends activations and gradients by hand. Here, PipelineStage does that: it sends
what a stage has computed, and it receives what the stage needs. A schedule says when a rank
computes which micro-batch. PyTorch has many schedules, and this lesson offers four:

  GPipe                  computes all forward passes first, and then all backward passes
                         (https://arxiv.org/abs/1811.06965).
  1F1B                   (one forward, one backward) starts each backward pass as early as
                         possible. So each of p ranks keeps the activations of at most p
                         micro-batches, instead of all of them.
  Interleaved1F1B        gives each rank two stages of half the size, so the ranks wait for a
                         shorter time, but send more messages (https://arxiv.org/abs/2104.04473).
  InterleavedZeroBubble  also splits each backward pass in two (https://arxiv.org/abs/2401.10241).

A backward pass computes two gradients in each layer: of the layer's input, and of its parameters.
Neither needs the other. The previous rank waits for the first, so it is computed at once. No rank
waits for the second, so a rank computes it when it would otherwise be idle.

With p ranks and m micro-batches, the first two schedules leave each rank idle for (p-1)/(m+p-1) of
the time, if messages take no time. The lesson measures this bubble after training, and counts the
activations that each rank keeps. A stage of half the size counts as half a micro-batch.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/pipeline_parallel.py --width 512 \
        --layers 8 --batch_size 1024
    torchrun --standalone --nproc-per-node 2 playground/pipeline_parallel.py --schedule 1F1B \
        --plot timeline.png

Run it on two nodes, with this command on both:
    NODE0=<ip of node 0> run/torchrun_node.sh playground/pipeline_parallel.py

It prints the table of ranks, the numbers of single_gpu.py, and a timeline of one step, as
manual_pipeline.py does. With InterleavedZeroBubble, a capital letter is the second part of a
backward pass. With GPipe, an ideal timeline looks like this:
    rank 0 |000111222333444555666777......aaabbbcccdddeeefffggghhh|
    rank 1 |...000111222333444555666777aaabbbcccdddeeefffggghhh...|

With 4 ranks and 8 micro-batches, it counts that rank 0 keeps the activations of 8 micro-batches
with GPipe, of 4 with 1F1B and InterleavedZeroBubble, and of 5.5 with Interleaved1F1B. A step with
one micro-batch follows for comparison. PyTorch's GPipe needs a micro-batch for each rank, so this
step runs LoopedBFS, a schedule with the same order.

Try breaking it, in a copy (cp playground/pipeline_parallel.py playground/broken.py):
  1. Leave out `, target=filled_labels` after `schedule.step(*inputs`. Which rank fails, and why
     only that one?
  2. Try --micro_batches 2, 4, 16 and 64. The bubble of the formula shrinks. Does the measured
     bubble shrink, too, and does the step become faster?

The next lesson, tensor_parallel.py, splits linear layers instead of the list of layers.
"""

import os
import sys
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders, whole_batch
from common.guard_rails import check, explained
from common.models import make_layers
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.timeline import show, watch

# If a run with two stages on each rank hangs on GPUs, set TORCH_DISTRIBUTED_PIPELINE_PER_EDGE_P2P=1
# in the environment (in PyTorch 2.14: PER_DIRECTION instead of PER_EDGE). Messages in one direction
# then do not wait for those in the other.
STAGES_PER_RANK = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2}


def possible_starts(layers):
    """Return the indices at which a stage can start: one for each layer that has parameters."""
    starts = []
    for index, layer in enumerate(layers):
        if list(layer.parameters()):
            # NEW: no stage may end with Flatten, whose output is a view. A backward pass in two
            # parts detaches a stage's output in place, and PyTorch forbids that for views.
            after_flatten = index > 0 and isinstance(layers[index - 1], torch.nn.Flatten)
            starts.append(index - 1 if after_flatten else index)
    return starts


def cut(layers, count):
    """Cut an nn.Sequential into stages, as in manual_pipeline.py. They must share no parameter."""
    starts = possible_starts(layers)
    inner = [starts[number * len(starts) // count] for number in range(1, count)]
    return [layers[start:end] for start, end in pairwise([0, *inner, len(layers)])]


def pipeline(parts, device, name, micro_batches):
    """Move the stages of this rank to its device, and make a schedule that runs them."""
    stages = []
    # NEW: with p ranks and two stages on each rank, rank 0 has stages 0 and p. So each stage sends
    # its output to the next rank, and the last rank sends to rank 0. Before the first step, PyTorch
    # runs each stage once on meaningless numbers, in order to learn the shape of its output.
    for number in range(dist.get_rank(), len(parts), dist.get_world_size()):
        part = parts[number].to(device)
        stages.append(PipelineStage(part, number, len(parts), device))
    # NEW: the loss of a micro-batch is the mean over its images. The schedule adds the gradients of
    # all micro-batches and divides the sum by the number of micro-batches. Because micro-batches
    # have equal sizes, the result is the gradient of the mean over the whole batch.
    schedule_class = schedules.get_schedule_class(name)
    if issubclass(schedule_class, schedules.PipelineScheduleMulti):
        schedule = schedule_class(stages, micro_batches, F.cross_entropy)
    else:
        schedule = schedule_class(stages[0], micro_batches, F.cross_entropy)
    return schedule, stages


def fill(tensor, batch_size):
    """Add zeros to the end of a batch, until it has this size."""
    missing = batch_size - len(tensor)
    zeros = tensor.new_zeros(missing, *tensor.shape[1:])
    return torch.cat([tensor, zeros])


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


def run_epoch(layers, schedule, loader, device, batch_size, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over all images: the loss, the number classified correctly, the number of
    images.
    """
    training = optimizer is not None
    layers.train(training)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        # NEW: the stages take batches of one size only, and the last test batch may be smaller.
        filled_images = fill(images, batch_size)
        filled_labels = fill(labels, batch_size)
        # NEW: rank 0 has the first stage, which takes images. All other stages receive activations.
        inputs = [filled_images] if dist.get_rank() == 0 else []
        if training:
            optimizer.zero_grad()
            # NEW: computes the forward and backward passes of all micro-batches
            outputs = schedule.step(*inputs, target=filled_labels)
            optimizer.step()
        else:
            with torch.no_grad():
                outputs = schedule.eval(*inputs, target=filled_labels)
        if outputs is not None:  # only the last rank has the logits
            logits = outputs[: len(labels)].detach()
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += len(labels)
    dist.all_reduce(sums)
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch. Then show when each rank computes."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args)
    # NEW: the stages take batches of one size only, so test batches get the size of training ones.
    test_loader = DataLoader(test_loader.dataset, args.batch_size, collate_fn=whole_batch)
    torch.manual_seed(args.seed)
    layers = make_layers(args)
    # A bug of PyTorch 2.9: a stage receives int64 in a buffer of the default dtype. float64 has 8
    # bytes, too. The model exists already, so its dtype stays. Newer versions do not need this.
    torch.set_default_dtype(torch.float64)  # https://github.com/pytorch/pytorch/pull/165539
    parts = cut(layers, world_size * STAGES_PER_RANK[args.schedule])
    schedule, stages = pipeline(parts, device, args.schedule, args.micro_batches)
    # The parameters of the other ranks get no gradients here, so Adam leaves them out.
    optimizer = torch.optim.Adam(layers.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(layers, schedule, progress, device, args.batch_size, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(layers, schedule, test_loader, device, args.batch_size)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    images, labels = next(iter(train_loader))
    shown = watch(schedule, stages, images, labels)
    # NEW: for comparison, a step with a single micro-batch, in which only one rank computes at any
    # time. With one stage on each rank, LoopedBFS has the order of GPipe.
    parts = cut(layers, world_size)
    schedule, stages = pipeline(parts, device, "LoopedBFS", 1)
    alone = watch(schedule, stages, images, labels)
    steps = {(args.schedule, args.micro_batches): shown, ("LoopedBFS", 1): alone}
    if rank == 0:
        show(steps, [f"rank {number}" for number in range(world_size)], args.plot)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    add = parser.add_argument
    add("--schedule", choices=STAGES_PER_RANK, default="GPipe")
    add("--micro_batches", type=int, default=8, help="micro-batches in a batch")
    add("--plot", metavar="PNG", help="draw the timeline into this file")
    args = parser.parse_args()
    check(parser, args, replicas=1)  # guard rail: refuses impossible flags
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size == 1:
        args.schedule = "GPipe"  # the other schedules need several ranks
    count = args.micro_batches
    stages = world_size * STAGES_PER_RANK[args.schedule]
    with torch.device("meta"):  # without memory
        starts = possible_starts(make_layers(args))
    if stages > len(starts):
        few = f"{stages} stages are too many for {len(starts)} layers with parameters"
        parser.error(f"{few}: start fewer processes, or use a larger --layers")
    nearest = max(1, round(count / world_size)) * world_size
    wrong = ""
    if STAGES_PER_RANK[args.schedule] == 2 and count % world_size:
        wrong = f"{args.schedule} needs a multiple of {world_size}, the number of ranks"
    elif count < world_size:
        wrong = f"{args.schedule} needs at least {world_size}, one for each rank"
    if wrong:
        parser.error(f"--micro_batches {count}: {wrong}: use --micro_batches {nearest}")
    if args.batch_size % count:
        nearest = max(1, round(args.batch_size / count)) * count
        wrong = f"--batch_size {args.batch_size} cannot be split into {count} equal micro-batches"
        parser.error(f"{wrong}: use --batch_size {nearest}")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
