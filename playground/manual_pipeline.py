r"""A pipeline by hand: a process for each stage of the model, and lists of what each computes.

model_parallel.py puts two stages of a model on two devices, in one process. Here each stage has a
process of its own, and each batch is split into micro-batches. A rank receives the activations of a
micro-batch from the previous rank, computes its stage, and sends the output to the next rank. In
the backward pass, gradients travel back.

A schedule is a list of passes: F2 is the forward pass of micro-batch 2, and B2 its backward pass.
Two functions return such lists, and the class Pipeline runs any list:

  GPipe   all forward passes first, then all backward passes. So each rank keeps the activations of
          all m micro-batches (https://arxiv.org/abs/1811.06965).
  1F1B    (one forward, one backward) each backward pass as early as possible. Rank r of p ranks
          keeps the activations of at most p - r micro-batches.

Both give the same losses, and the same bubble of (p-1)/(m+p-1), which model_parallel.py explains.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/manual_pipeline.py --width 512 \
        --layers 8 --batch_size 1024
    torchrun --standalone --nproc-per-node 4 playground/manual_pipeline.py --schedule 1F1B

Run it on two nodes, with this command on both:
    NODE0=<ip of node 0> run/torchrun_node.sh playground/manual_pipeline.py

It prints the table of ranks, the numbers of single_gpu.py, and a timeline of one step. A digit is
the forward pass of a micro-batch, a letter its backward pass (a: micro-batch 0), a dot waiting:
   rank 0: F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
   rank 1: F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
   GPipe, 8 micro-batches: 0.1350 s, bubble 0.19, (p-1)/(m+p-1) = 0.11
   rank 0 |0000111222233344445556666777........aaaaaa.bbbbb.ccccc.ddddd.eeeeeeee.fffff.ggggg.hhhhhh|
   rank 1 |....00.111.22.333.44.555.66.777aaaaabbbbbbcccccddddddeeeeeffffffgggggghhhhh.............|
   micro-batches whose activations are kept, at most: 8, 8

Then it shows a step with one micro-batch, and `the first is 1.34 times as fast as the second`. With
--batch_size 2048, an epoch took 6.3 s on 2 cores, and 9.5 s in single_gpu.py on one core.

Try breaking it, in a copy (cp playground/manual_pipeline.py playground/broken.py):
  1. In `forward`, leave out `* len(labels) / self.batch_size`. How many times too large are the
     gradients then, and why does Adam hardly notice?
  2. No copy is needed: add --timeout 10 --schedule F0,B0,F1,B1 F0,F1,B0,B1. What does each rank
     wait for? Write a list for each rank that ends, and see when it waits.

Now write it yourself: gpipe.py and order_1f1b.py in playground/exercises/. Your gpipe.py also
trains what Pipeline cannot, such as frozen stages, and integers as the inputs of rank 0.

The next lesson, pipeline_parallel.py, lets PyTorch do this, with more schedules.
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

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_layers
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.timeline import show, watch_step


def gpipe(rank, world_size, micro_batches):
    """Return the passes of a rank: all forward passes, then all backward passes."""
    forward = [f"F{number}" for number in range(micro_batches)]
    backward = [f"B{number}" for number in range(micro_batches)]
    return forward + backward


def one_forward_one_backward(rank, world_size, micro_batches):
    """Return the passes of a rank: each backward pass as early as possible."""
    # NEW: from this rank on there are p - r ranks. The first micro-batch must pass all of them
    # before its gradient can come back. So this rank computes p - r forward passes first.
    ahead = min(world_size - rank, micro_batches)
    passes = [f"F{number}" for number in range(ahead)]
    for number in range(micro_batches):
        passes.append(f"B{number}")
        if ahead + number < micro_batches:
            passes.append(f"F{ahead + number}")
    return passes


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


class Pipeline:
    """This rank's stage of a model. It computes lists of passes.

    Args:
        stage: the layers of this rank, on its device.
        shape: of what the stage receives for one image.
        device: of the stage.
        timeout: how long a rank waits for a message.
    """

    def __init__(self, stage, shape, device, timeout):
        self.stage = stage
        self.shape = shape
        self.device = device
        self.rank = dist.get_rank()
        self.last_rank = dist.get_world_size() - 1
        # NEW: activations and gradients have a group each. On GPUs, a group runs the messages of a
        # rank one after another. With 1F1B in a single group, rank 0 would send the activations of
        # micro-batch 1 while rank 1 sends the gradient of micro-batch 0. Each of these messages
        # could wait for a receive that comes after the other one.
        self.activations = dist.new_group(timeout=timeout)
        self.gradients = dist.new_group(timeout=timeout)

    def step(self, passes, images, labels):
        """Compute the passes of a batch, in this order. The last rank returns the logits, (N, 10).

        All ranks have the whole batch. The first rank computes with the images, and the last one
        with the labels. The others use only the number of images in each micro-batch.
        """
        micro_batches = len([each for each in passes if each.startswith("F")])
        # tensor_split makes this many parts of any batch. Their sizes may differ by one.
        self.images = images.tensor_split(micro_batches)
        self.labels = labels.tensor_split(micro_batches)
        self.batch_size = len(labels)
        # These dicts have the number of the micro-batch as their key.
        self.inputs = {}
        self.outputs = {}
        self.logits = {}
        self.sent_activations = {}
        self.sent_gradients = {}
        for each in passes:
            number = int(each[1:])
            if each.startswith("F"):
                self.forward(number)
            else:
                self.backward(number)
        for message in [*self.sent_activations.values(), *self.sent_gradients.values()]:
            message.wait()
        if self.rank < self.last_rank:
            return None
        return torch.cat([self.logits[number] for number in range(micro_batches)])

    def forward(self, number):
        """Receive activations, compute the stage, and send its output."""
        images = self.images[number]
        inputs = images
        if self.rank > 0:
            inputs = images.new_empty(len(images), *self.shape)  # of the same dtype
            dist.recv(inputs, src=self.rank - 1, group=self.activations)
            inputs.requires_grad_()  # NEW: backward() then fills inputs.grad
        output = self.stage(inputs)
        if self.rank < self.last_rank:
            # A message has only numbers: no autograd graph, and no strides.
            sent = output.detach().contiguous()
            to_next = dist.isend(sent, dst=self.rank + 1, group=self.activations)
            self.sent_activations[number] = to_next
        else:
            self.logits[number] = output.detach()
            # NEW: on the last rank, the stage ends with the loss. This is the micro-batch's part of
            # the mean loss over the batch.
            labels = self.labels[number]
            output = F.cross_entropy(output, labels) * len(labels) / self.batch_size
        self.inputs[number] = inputs
        self.outputs[number] = output

    def backward(self, number):
        """Receive the gradient of the output, compute that of the input, and send it."""
        inputs = self.inputs.pop(number)
        output = self.outputs.pop(number)
        gradient = None  # backward() of a loss needs none
        if self.rank < self.last_rank:
            gradient = output.new_empty(output.shape)
            dist.recv(gradient, src=self.rank + 1, group=self.gradients)
            # The gradient is here, so the activations have arrived. wait() lets go of their memory.
            self.sent_activations.pop(number).wait()
        output.backward(gradient)  # NEW: starts with the gradient that the next rank has sent
        if self.rank > 0:
            to_previous = dist.isend(inputs.grad, dst=self.rank - 1, group=self.gradients)
            self.sent_gradients[number] = to_previous


def with_parameters(layers):
    """Return the indices of the layers that have parameters."""
    return [index for index, layer in enumerate(layers) if list(layer.parameters())]


def cut(layers, count):
    """Cut an nn.Sequential into stages with about the same number of layers with parameters."""
    indices = with_parameters(layers)
    starts = [indices[number * len(indices) // count] for number in range(1, count)]
    stages = [layers[start:end] for start, end in pairwise([0, *starts, len(layers)])]
    in_stages = sum(len(list(stage.parameters())) for stage in stages)
    if in_stages > len(list(layers.parameters())):
        raise ValueError("two stages share a parameter, and each rank would train its own copy")
    return stages


def shape_after(stages, image):
    """Return the shape of what these stages return for an image. They are on the meta device."""
    activations = image.to("meta")[None]  # NEW: a batch of one, with a shape but without numbers
    for stage in stages:
        activations = stage.eval()(activations)
    return activations.shape[1:]


def lists_of(schedule, world_size, micro_batches):
    """Return the passes of all ranks: those of a schedule in SCHEDULES, or those that are given."""
    if len(schedule) == 1 and schedule[0] in SCHEDULES:
        passes_of = SCHEDULES[schedule[0]]
        return [passes_of(rank, world_size, micro_batches) for rank in range(world_size)]
    return [passes.split(",") for passes in schedule]


def fault_in(lists, world_size):
    """Return what is wrong with the passes of all ranks, or "". It does not look for deadlocks."""
    if len(lists) != world_size:
        return f"{world_size} ranks need GPipe, 1F1B, or {world_size} lists such as F0,F1,B0,B1"
    micro_batches = max(1, len([each for each in lists[0] if each.startswith("F")]))
    right = gpipe(0, world_size, micro_batches)
    for rank, passes in enumerate(lists):
        for each in [*right, *passes]:
            times = passes.count(each)
            if each not in right or times != 1:
                return f"rank {rank} has {each} {times} times, and needs {' '.join(right)} once"
        for number in range(micro_batches):
            if passes.index(f"B{number}") < passes.index(f"F{number}"):
                return f"rank {rank} has B{number} before F{number}"
        for kind in ("F", "B"):
            order = [each for each in passes if each.startswith(kind)]
            first = [each for each in lists[0] if each.startswith(kind)]
            if order != first:
                orders = f"{' '.join(order)}, but rank 0 {' '.join(first)}"
                return (
                    f"rank {rank} has the order {orders}. Messages arrive in the order of sending"
                )
    return ""


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


def run_epoch(pipeline, passes, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over all images: the loss, the number classified correctly, the number of
    images.
    """
    training = optimizer is not None
    pipeline.stage.train(training)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if training:
            optimizer.zero_grad()
            logits = pipeline.step(passes, images, labels)
            optimizer.step()
        else:
            with torch.no_grad():
                logits = pipeline.step(passes, images, labels)
        if logits is not None:  # NEW: only the last rank has them
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += len(labels)
    dist.all_reduce(sums)  # NEW: now all ranks have the sums
    return sums.tolist()


def train(args):
    """Train and test, and print one line for each epoch. Then show when each rank computes."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    train_loader, test_loader = loaders(args)  # NEW: all ranks read the same batches
    torch.manual_seed(args.seed)
    # NEW: each rank makes the whole model on the CPU, and moves only its own stage to its GPU.
    stage = cut(make_layers(args), world_size)[rank].to(device)
    # NEW: a rank must know the shape of a message before it can receive one. The earlier stages
    # compute it on the meta device, whose tensors take no memory. So no message is needed for it.
    with torch.device("meta"):
        earlier_stages = cut(make_layers(args), world_size)[:rank]
    image, _ = train_loader.dataset[0]
    shape = shape_after(earlier_stages, image)
    pipeline = Pipeline(stage, shape, device, timedelta(seconds=args.timeout))
    lists = lists_of(args.schedule, world_size, args.micro_batches)
    passes = lists[rank]
    forward_passes = [each for each in passes if each.startswith("F")]
    optimizer = torch.optim.Adam(stage.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(pipeline, passes, progress, device, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(pipeline, forward_passes, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    stage.train()
    images, labels = next(iter(train_loader))
    batch = images.to(device), labels.to(device)
    name = args.schedule[0] if len(args.schedule) == 1 else "your lists"
    steps = {}
    steps[name, args.micro_batches] = watch_step(partial(pipeline.step, passes, *batch), [pipeline])
    # NEW: with a single micro-batch, only one rank computes at any time.
    one = gpipe(rank, world_size, 1)
    steps["GPipe", 1] = watch_step(partial(pipeline.step, one, *batch), [pipeline])
    if rank == 0:
        for number, each in enumerate(lists):
            print(f"rank {number}: {' '.join(each)}", flush=True)
        show(steps, [f"rank {number}" for number in range(world_size)], args.plot)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training(), flags.ranks()])
    add = parser.add_argument
    lists = "GPipe, 1F1B, or a list for each rank, as in --schedule F0,F1,B0,B1 F0,B0,F1,B1"
    add("--schedule", nargs="+", default=["GPipe"], metavar="LIST", help=lists)
    add("--micro_batches", type=int, default=8, help="micro-batches in a batch")
    add("--plot", metavar="PNG", help="draw the timeline into this file")
    args = parser.parse_args()
    check(parser, args, replicas=1)  # guard rail: refuses impossible flags
    world_size = int(os.environ["WORLD_SIZE"])
    with torch.device("meta"):
        most = len(with_parameters(make_layers(args)))
    if world_size > most:
        few = f"{world_size} stages, but only {most} layers have parameters"
        parser.error(f"{few}: start fewer processes, or use a larger --layers")
    lists = lists_of(args.schedule, world_size, args.micro_batches)
    fault = fault_in(lists, world_size)
    if fault:
        parser.error(f"--schedule: {fault}")
    args.micro_batches = len(lists[0]) // 2
    if args.micro_batches > args.batch_size:
        most = args.batch_size
        parser.error(f"--micro_batches {args.micro_batches}: use at most {most}, one image in each")
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
