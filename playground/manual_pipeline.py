"""A pipeline by hand: a process for each stage of the model, and micro-batches that flow through.

model_parallel.py puts two stages of a model on two devices, in one process. Here each stage has a
process of its own, which may be on another node. A rank receives the activations of a micro-batch
from the previous rank, computes its stage, and sends the result to the next rank. In the backward
pass, gradients travel back. A rank receives the gradient of its output, calls
output.backward(gradient), and sends the gradient of its input, input.grad, to the previous rank. So
what a rank receives must require a gradient.

A schedule is the order in which a rank computes forward and backward passes. This lesson has two:

  GPipe   computes all forward passes first, and then all backward passes. So each rank keeps the
          activations of all m micro-batches until their backward pass
          (https://arxiv.org/abs/1811.06965).
  1F1B    (one forward, one backward) starts each backward pass as early as possible. Rank r of p
          ranks keeps the activations of at most p - r micro-batches. The losses are the same.

The loss of a micro-batch is multiplied by its fraction of the batch. So the losses add up to the
mean over the batch, and so do the gradients. With p ranks and m micro-batches, each rank is idle
for (p-1)/(m+p-1) of the time with either schedule. model_parallel.py explains this bubble.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/manual_pipeline.py
    torchrun --standalone --nproc-per-node 4 playground/manual_pipeline.py --schedule 1F1B

Run it on two nodes, with this command on both:
    NODE0=<ip of node 0> run/torchrun_node.sh playground/manual_pipeline.py

It prints the table of ranks and the same numbers as single_gpu.py. Then it prints the largest
number of micro-batches whose activations each rank kept at one time. The second command prints:
    largest number of micro-batches whose activations each rank kept: [4, 3, 2, 1]

It ends with a timeline of one step. A digit is the forward pass of the micro-batch with that
number, a letter is its backward pass (a: micro-batch 0), and a dot means waiting. With --schedule
1F1B and wide layers, an ideal timeline looks like this:
    rank 0 |000111...aaa222bbb333ccc444ddd555eee666fff777ggg...hhh|
    rank 1 |...000aaa111bbb222ccc333ddd444eee555fff666ggg777hhh...|

Try breaking it, in a copy:
  1. In `Stage.backward`, leave out `* len(labels) / self.batch_size`. How many times too large are
     the gradients then, and why does Adam hardly notice?
  2. In `one_forward_one_backward`, set `warm_up = 0`. The numbers stay right. What is lost?

Now write it yourself: gpipe.py and order_1f1b.py in playground/exercises/.

The next lesson, pipeline_parallel.py, lets PyTorch do this, with more schedules.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1]))  # find common/ from any working directory
from common import flags
from common.data import fetch, loaders
from common.guard_rails import check, explained
from common.models import make_model
from common.report import RANKS, bar, epoch_line, rank_row
from common.roll_call import meet
from measure.timeline import show, watch_step

# How many layers have parameters. The number of hidden layers is the default of --layers. The other
# layers are the last one and, in the CNN, the two convolutions.
HIDDEN_LAYERS = {"mlp": 3, "cnn": 1}
OTHER_LAYERS = {"mlp": 1, "cnn": 3}


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


def cut(layers, count):
    """Cut an nn.Sequential into stages with about the same number of layers that have parameters.

    The stages are made of the same modules, so training the stages trains the nn.Sequential. Two
    stages must not share a parameter or a buffer, because each rank would change its own copy.
    """
    modules = list(layers)
    with_parameters = []
    for index, module in enumerate(modules):
        if list(module.parameters()):
            with_parameters.append(index)
    if count > len(with_parameters):
        raise ValueError(
            f"{len(with_parameters)} layers have parameters, too few for {count} stages"
        )
    starts = [0]
    for number in range(1, count):
        start = with_parameters[number * len(with_parameters) // count]
        # If a Flatten is in front of this layer, the stage starts with it. In the next lesson a
        # stage must not end with a view, which is what Flatten returns.
        while isinstance(modules[start - 1], (torch.nn.Flatten, torch.nn.Unflatten)):
            start -= 1
        starts.append(start)
    ends = [*starts[1:], len(modules)]
    stages = []
    for start, end in zip(starts, ends, strict=True):
        stages.append(torch.nn.Sequential(*modules[start:end]))
    stage_of = {}
    for number, stage in enumerate(stages):
        for tensor in [*stage.parameters(), *stage.buffers()]:
            first = stage_of.setdefault(tensor, number)
            if first != number:
                shape = tuple(tensor.shape)
                raise ValueError(f"stages {first} and {number} share a tensor of shape {shape}")
    return stages


class Stage:
    """This rank's stage, and the activations that it keeps until their backward pass."""

    def __init__(self, layers, image, device):
        self.layers = layers.to(device)
        self.device = device
        self.rank = dist.get_rank()
        self.is_first = self.rank == 0
        self.is_last = self.rank == dist.get_world_size() - 1
        self.most_kept = 0  # the largest number of micro-batches kept at one time
        self.learn_input(image)
        # This only makes the empty dicts. run_epoch() calls begin() again for each batch.
        self.begin(torch.empty(0), torch.empty(0), 1)

    def learn_input(self, image):
        """Find out the shape and the dtype of what this stage receives for one image.

        A rank must know them before it can receive, because irecv needs a tensor to receive into.
        The first stage receives the image. Each rank tells the next one what its stage returns.
        """
        example = [tuple(image.shape), image.dtype]
        if not self.is_first:
            dist.recv_object_list(example, src=self.rank - 1)
        self.input_shape, self.input_dtype = example
        zeros = torch.zeros(1, *self.input_shape, dtype=self.input_dtype, device=self.device)
        self.layers.eval()  # batch norm does not count the zeros
        with torch.no_grad():
            output = self.layers(zeros)
        if not self.is_last:
            dist.send_object_list([tuple(output.shape[1:]), output.dtype], dst=self.rank + 1)

    def begin(self, images, labels, micro_batches):
        """Split a batch into micro-batches.

        The first stage computes with the images, and the last one with the labels. The other stages
        only need the size of each micro-batch.
        """
        self.batch_size = len(labels)
        # tensor_split always makes this many parts. chunk may make fewer.
        self.images = images.tensor_split(micro_batches)
        self.labels = labels.tensor_split(micro_batches)
        # These dicts have the number of the micro-batch as their key.
        self.inputs = {}
        self.outputs = {}
        self.output_gradients = {}
        self.input_gradients = {}
        self.logits = []  # on the last rank

    def forward(self, number):
        """Compute the forward pass of a micro-batch, and keep its activations."""
        if self.is_first:
            self.inputs[number] = self.images[number]
        self.outputs[number] = self.layers(self.inputs[number])
        if self.is_last:
            self.logits.append(self.outputs[number].detach())
        self.most_kept = max(self.most_kept, len(self.outputs))

    def backward(self, number):
        """Compute the backward pass of a micro-batch, and free its activations."""
        stage_input = self.inputs.pop(number)
        output = self.outputs.pop(number)
        gradient = self.output_gradients.pop(number, None)
        if self.is_last:
            # NEW: this micro-batch's part of the mean loss over the batch
            labels = self.labels[number]
            output = F.cross_entropy(output, labels) * len(labels) / self.batch_size
        if output.requires_grad:  # false in a first stage whose parameters are all frozen
            output.backward(gradient)  # NEW: begins with the gradient that the next rank has sent
        if not self.is_first:
            self.input_gradients[number] = stage_input.grad

    def talk_to_previous(self, send_gradient_of=None, receive_activations_of=None):
        """Send the gradient of a micro-batch to the previous rank, receive activations, or both.

        Each argument is the number of a micro-batch, or None. The first stage has no previous rank.

        batch_isend_irecv starts a list of sends and receives together. With GPipe, send and recv
        would do, because then no rank sends to a neighbour that is sending to it.
        """
        if self.is_first:
            return
        operations = []
        if send_gradient_of is not None:
            message = self.input_gradients.pop(send_gradient_of).contiguous()
            operations.append(dist.P2POp(dist.isend, message, self.rank - 1))
        if receive_activations_of is not None:
            shape = (len(self.labels[receive_activations_of]), *self.input_shape)
            buffer = torch.empty(shape, dtype=self.input_dtype, device=self.device)
            operations.append(dist.P2POp(dist.irecv, buffer, self.rank - 1))
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        if receive_activations_of is not None:
            # NEW: backward() then fills buffer.grad, which is what the previous rank needs.
            self.inputs[receive_activations_of] = buffer.requires_grad_(torch.is_grad_enabled())

    def talk_to_next(self, send_activations_of=None, receive_gradient_of=None):
        """Send the activations of a micro-batch to the next rank, receive a gradient, or both.

        Each argument is the number of a micro-batch, or None. The last stage has no next rank.
        """
        if self.is_last:
            return
        operations = []
        if send_activations_of is not None:
            # detach: a message has only numbers, and no autograd graph.
            message = self.outputs[send_activations_of].detach().contiguous()
            operations.append(dist.P2POp(dist.isend, message, self.rank + 1))
        if receive_gradient_of is not None:
            # The gradient arrives in the order of a contiguous tensor. empty_like would keep the
            # strides of an output that is transposed.
            output = self.outputs[receive_gradient_of]
            buffer = torch.empty(output.shape, dtype=output.dtype, device=output.device)
            operations.append(dist.P2POp(dist.irecv, buffer, self.rank + 1))
            self.output_gradients[receive_gradient_of] = buffer
        for request in dist.batch_isend_irecv(operations):
            request.wait()


def forward_only(stage, micro_batches):
    """Compute the forward passes of all micro-batches."""
    for number in range(micro_batches):
        stage.talk_to_previous(receive_activations_of=number)
        stage.forward(number)
        stage.talk_to_next(send_activations_of=number)


def gpipe(stage, micro_batches):
    """Compute all forward passes, and then all backward passes."""
    # NEW: the activations of all micro-batches are kept until the second loop.
    forward_only(stage, micro_batches)
    for number in range(micro_batches):
        stage.talk_to_next(receive_gradient_of=number)
        stage.backward(number)
        stage.talk_to_previous(send_gradient_of=number)


def one_forward_one_backward(stage, micro_batches):
    """Compute one forward pass for each rank after this one, then alternate forward and backward.

    In the middle part, a rank and its neighbour send to each other at the same time. So each of
    them sends and receives in one batch of operations. With send and recv, both would wait in send.
    """
    # NEW: the first micro-batch has to pass each rank after this one before its gradient comes
    # back. This rank would be idle meanwhile, so it computes one forward pass for each of these
    # ranks now, and one more at the start of the middle part.
    ranks_after = dist.get_world_size() - 1 - stage.rank
    warm_up = min(ranks_after, micro_batches)
    # In the warm-up there are only forward passes.
    for number in range(warm_up):
        stage.talk_to_previous(receive_activations_of=number)
        stage.forward(number)
        stage.talk_to_next(send_activations_of=number)
    if warm_up < micro_batches:
        stage.talk_to_previous(receive_activations_of=warm_up)
    # In the middle: a forward pass of the newest micro-batch, then a backward pass of the oldest.
    for number in range(micro_batches - warm_up):
        newest = warm_up + number
        stage.forward(newest)
        stage.talk_to_next(send_activations_of=newest, receive_gradient_of=number)
        stage.backward(number)
        following = newest + 1 if newest + 1 < micro_batches else None
        stage.talk_to_previous(send_gradient_of=number, receive_activations_of=following)
    # At the end, only backward passes are left.
    for number in range(micro_batches - warm_up, micro_batches):
        stage.talk_to_next(receive_gradient_of=number)
        stage.backward(number)
        stage.talk_to_previous(send_gradient_of=number)


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


def run_epoch(stage, loader, device, schedule=None, micro_batches=1, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over all images: the loss, the number classified correctly, the number of
    images.
    """
    training = optimizer is not None
    stage.layers.train(training)
    # The sums stay on the device. Reading them in each step would make Python wait for the GPU.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        stage.begin(images, labels, micro_batches)
        with torch.set_grad_enabled(training):
            if training:
                optimizer.zero_grad()
                schedule(stage, micro_batches)  # NEW: forward and backward of all micro-batches
                optimizer.step()
            else:
                forward_only(stage, micro_batches)
        if stage.is_last:  # NEW: only the last rank has the logits
            logits = torch.cat(stage.logits)
            loss = F.cross_entropy(logits, labels)
            sums[0] += loss * len(labels)
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += len(labels)
    dist.all_reduce(sums)  # NEW: now all ranks have the sums
    return sums.tolist()


def watch(stage, schedule, images, labels, micro_batches):
    """Note when each rank computes in a step. Returns what show() prints."""
    stage.layers.train()

    def step():
        stage.begin(images.to(stage.device), labels.to(stage.device), micro_batches)
        schedule(stage, micro_batches)

    # The methods of the stage that are timed, and what each of them computes.
    methods = {"forward": "forward", "backward": "backward"}
    return watch_step(step, [stage], methods)


def train(args):
    """Train and test, and print one line for each epoch. Then show when each rank computes."""
    rank, device = join(args)
    meet(args)  # guard rail: compares the flags of the ranks
    world_size = dist.get_world_size()
    # NEW: all ranks read the same batches. The first stage uses the images, and the last one uses
    # the labels.
    train_loader, test_loader = loaders(args)
    torch.manual_seed(args.seed)
    # NEW: each rank makes the whole model on the CPU, and moves only its own stage to its GPU.
    model = make_model(args)
    layers = torch.nn.Sequential(*model.stage1, *model.stage2)
    parts = cut(layers, world_size)
    image, _ = train_loader.dataset[0]
    stage = Stage(parts[rank], image, device)
    schedule = SCHEDULES[args.schedule]
    # NEW: the parameters of the other ranks get no gradients here, so Adam leaves them out.
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        start = time.perf_counter()
        progress = bar(train_loader, show=rank == 0)
        trained = run_epoch(stage, progress, device, schedule, args.micro_batches, optimizer)
        seconds = time.perf_counter() - start
        tested = run_epoch(stage, test_loader, device)
        if rank == 0:
            print(epoch_line(args, epoch, seconds, trained, tested), flush=True)
    kept = [None] * world_size
    dist.all_gather_object(kept, stage.most_kept)
    if rank == 0:
        words = "largest number of micro-batches whose activations each rank kept"
        print(f"{words}: {kept}", flush=True)
    images, labels = next(iter(train_loader))
    steps = {}
    steps[args.schedule, args.micro_batches] = watch(
        stage, schedule, images, labels, args.micro_batches
    )
    # NEW: with a single micro-batch, only one rank computes at any time.
    steps["GPipe", 1] = watch(stage, gpipe, images, labels, 1)
    if rank == 0:
        show(steps, [f"rank {number}" for number in range(world_size)], args.plot)
    dist.destroy_process_group()


@explained  # guard rail: explains errors
@record  # torchrun's report then shows the error of the rank that failed first
def main():
    """Read the flags, make sure that the data is there, and train as one of the ranks."""
    parser = flags.Parser(__doc__, parents=[flags.training()])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--schedule", choices=SCHEDULES, default="GPipe")
    add("--micro_batches", type=int, default=8, help="micro-batches in a batch")
    add("--plot", metavar="PNG", help="draw the timeline into this file")
    add("--timeout", type=int, default=60, help="seconds to wait for another rank")
    add("--batch_size", type=int, default=128, help="images in a step, over all ranks")
    args = parser.parse_args()
    check(parser, args, replicas=1)  # guard rail: refuses impossible flags
    world_size = int(os.environ["WORLD_SIZE"])
    layers = args.layers or HIDDEN_LAYERS[args.model]
    if layers + OTHER_LAYERS[args.model] < world_size:
        needed = world_size - OTHER_LAYERS[args.model]
        parser.error(f"{world_size} stages need {world_size} layers in all: use --layers {needed}")
    if args.micro_batches > args.batch_size:
        most = args.batch_size
        parser.error(f"--micro_batches {args.micro_batches}: use at most {most}, one image in each")
    # The ranks of a node fetch the data one at a time, so it is downloaded once.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
