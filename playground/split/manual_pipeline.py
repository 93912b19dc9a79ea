r"""A pipeline by hand: each rank keeps some of the layers, and computes a list of passes.

Run it:
    torchrun --standalone --nproc-per-node 2 playground/split/manual_pipeline.py \
        --schedule 1F1B --micro_batches 4

It prints the same numbers as `single_gpu.py`, up to rounding (with `--double` all twelve digits
agree). Then it shows what each rank has computed in every step, and what it keeps. F2 is the
forward pass of micro-batch 2, and B2 is its backward pass:
    rank 0: F0 F1 B0 F2 B1 F3 B2 B3
    rank 1: F0 B0 F1 B1 F2 B2 F3 B3
    rank 0 keeps 54,400 parameters, and the activations of at most 2 micro-batches
    rank 1 keeps 4,810 parameters, and the activations of at most 1 micro-batch

In `model_parallel.py`, one process runs both stages. Here each stage has a process of its own,
which receives the activations of a micro-batch from the previous rank, computes its layers, and
sends the output to the next rank. In the backward pass, gradients travel back.

A schedule is a list of passes. Two functions return such lists, and `Pipeline` computes any list.
With GPipe, the default, all forward passes come first, so a rank keeps the activations of all
micro-batches. 1F1B (one forward, one backward) computes each backward pass as early as possible, so
rank r of p keeps the activations of at most p - r micro-batches. With both schedules, a rank waits
for the same part of the time, the bubble (`model_parallel.py`). Both are in the picture
`playground/pages/figures/schedules.svg`.

In a list of your own, B may have two parts. I computes the gradient of the input, for which the
previous rank waits, and W those of the parameters, which can fill the bubble ("zero bubble",
https://arxiv.org/abs/2401.10241):
    --schedule F0,F1,I0,F2,I1,W0,I2,W1,W2 F0,I0,F1,I1,W0,F2,I2,W1,W2

Try breaking it, in a copy beside it:
  1. In `forward_pass()`, write `F.cross_entropy(output, labels)`, the mean over a micro-batch. How
     many times too large are the gradients then, and why does Adam hardly notice?
  2. No copy is needed: add `--timeout 10 --schedule F0,B0,F1,B1 F0,F1,B0,B1`. What does each rank
     wait for? Find two lists with which the run ends.
  3. Let both directions have one group: `self.gradients = self.activations`. gloo trains as before.
     What would NCCL do? (`playground/tools/watch.py --nccl` in front of the copy tells it.)
Now write it yourself: `gpipe.py` and `order_1f1b.py` in `playground/exercises/`.
Builds on: model_parallel.py
The next lesson, `pipeline_parallel.py`, lets PyTorch do this, with more schedules.
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
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_layers


def gpipe(rank, world_size, micro_batches):
    """Return the passes of a rank: all forward passes, then all backward passes."""
    forward = [f"F{number}" for number in range(micro_batches)]
    backward = [f"B{number}" for number in range(micro_batches)]
    return forward + backward  # https://arxiv.org/abs/1811.06965


def one_forward_one_backward(rank, world_size, micro_batches):
    """Return the passes of a rank: each backward pass as early as possible."""
    # NEW: a micro-batch crosses p - r stages, from rank r to the last one, before its gradient
    # comes back. So that all of these have work, rank r begins with p - r forward passes.
    ahead = min(world_size - rank, micro_batches)
    passes = [f"F{number}" for number in range(ahead)]
    for number in range(micro_batches):
        passes.append(f"B{number}")
        if ahead + number < micro_batches:
            passes.append(f"F{ahead + number}")
    return passes


SCHEDULES = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


class Pipeline(torch.nn.Module):
    """The stage of this rank, and the passes that it computes in each step.

    Args:
        stage: the layers of this rank, on its device.
        shapes: of one image, and of what the stage receives for it.
        passes: a list such as F0, F1, B0, B1.
        timeout: how long a rank waits for a message.
    """

    def __init__(self, stage, shapes, passes, timeout):
        super().__init__()
        self.stage = stage
        self.image_shape, self.shape = shapes
        self.dtype = next(stage.parameters()).dtype  # of all messages
        dtypes = [None] * dist.get_world_size()
        dist.all_gather_object(dtypes, self.dtype)
        if len({*dtypes}) > 1:  # gloo would fill a part of a buffer, without an error
            raise ValueError(f"the parameters of the stages have different dtypes: {dtypes}")
        self.passes = passes
        self.most_kept = 0  # micro-batches whose activations were kept at the same time
        self.rank = dist.get_rank()
        self.last_rank = dist.get_world_size() - 1
        # NEW: activations and gradients have a group each, because in one group NCCL carries out
        # messages in the order of the calls. If rank 0 sends activations while rank 1 sends a
        # gradient, each would wait until the other receives.
        self.activations = dist.new_group(timeout=timeout)
        self.gradients = dist.new_group(timeout=timeout)

    def forward(self, images, labels):
        """Compute the passes of a batch in their order. The last rank returns the logits, (N, 10).

        In training, this computes the gradients, too. All ranks have the whole batch. The first
        rank computes with the images, and the last one with the labels. The others use only the
        number of images in each micro-batch.
        """
        if images.shape[1:] != self.image_shape:  # on all ranks, for gloo would not notice it
            raise ValueError(f"the stages were made for images of shape {self.image_shape}")
        forward_passes = [each for each in self.passes if each.startswith("F")]
        micro_batches = len(forward_passes)
        # tensor_split makes this many parts of any batch. Their sizes may differ by one.
        self.images = images.tensor_split(micro_batches)
        self.labels = labels.tensor_split(micro_batches)
        self.count = (labels != -100).sum()  # -100 is for what has no label
        # These dicts have the number of the micro-batch as their key.
        self.inputs = {}
        self.outputs = {}
        self.for_weights = {}
        self.logits = {}
        self.sent_activations = {}
        self.sent_gradient = None
        passes = self.passes if self.training else forward_passes
        for each in passes:
            number = int(each[1:])
            if each.startswith("F"):
                self.forward_pass(number)
            elif each.startswith("W"):
                self.weights_pass(number)
            else:
                self.backward_pass(number, whole=each.startswith("B"))
        for message in self.sent_activations.values():
            message.wait()
        if self.sent_gradient is not None:
            self.sent_gradient.wait()
        if self.rank < self.last_rank:
            return None
        return torch.cat([self.logits[number] for number in range(micro_batches)])

    def forward_pass(self, number):
        """Receive activations, compute the stage, and send its output."""
        images = self.images[number]
        inputs = images
        if self.rank > 0:
            shape = (len(images), *self.shape)
            inputs = torch.empty(shape, dtype=self.dtype, device=images.device)
            dist.recv(inputs, src=self.rank - 1, group=self.activations)
            inputs.requires_grad_(self.training)  # NEW: backward() then fills inputs.grad
        output = self.stage(inputs).to(self.dtype)  # the next rank expects this dtype
        if self.rank < self.last_rank:
            # A message has only numbers: no autograd graph, and no strides. (Then Megatron-LM frees
            # these numbers, because backward() needs only the graph of `output`.)
            sent = output.detach().contiguous()
            message = dist.isend(sent, self.rank + 1, group=self.activations)
            self.sent_activations[number] = message
        else:
            self.logits[number] = output.detach()
            # NEW: on the last rank, the stage ends with the loss. This is the micro-batch's part of
            # the mean loss over the batch.
            labels = self.labels[number]
            output = F.cross_entropy(output, labels, reduction="sum") / self.count
        if self.training:
            self.inputs[number] = inputs
            self.outputs[number] = output  # its autograd graph keeps all activations of the stage
            kept = len(self.outputs) + len(self.for_weights)
            self.most_kept = max(self.most_kept, kept)

    def backward_pass(self, number, whole):
        """Receive the gradient of the output, compute that of the input, and send it.

        If the pass is whole, the parameters get their gradients, too, and otherwise later.
        """
        inputs = self.inputs.pop(number)
        output = self.outputs.pop(number)
        gradient = None  # on the last rank, whose output is the loss
        if self.rank < self.last_rank:
            gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
            dist.recv(gradient, src=self.rank + 1, group=self.gradients)
            # The gradient is here. So the next rank has the activations, and wait() does not block.
            # It frees their memory.
            self.sent_activations.pop(number).wait()
        if not whole:
            self.for_weights[number] = (output, gradient)
            if self.rank > 0:  # NEW: only the gradient of the input. The graph stays for W.
                output.backward(gradient, inputs=[inputs], retain_graph=True)
        elif output.requires_grad:  # not if all stages up to here are frozen
            output.backward(gradient)  # NEW: starts with the gradient that the next rank has sent
        if self.rank > 0:
            if self.sent_gradient is not None:
                self.sent_gradient.wait()  # the one before, so that only one is in memory
            self.sent_gradient = dist.isend(inputs.grad, self.rank - 1, group=self.gradients)

    def weights_pass(self, number):
        """Compute the gradients of the parameters, after those of the input have been sent."""
        output, gradient = self.for_weights.pop(number)
        # Autograd computes the gradients between the layers again. Libraries keep them.
        trained = [each for each in self.stage.parameters() if each.requires_grad]
        if trained:
            output.backward(gradient, inputs=trained)


def train(args):
    """Train a model whose layers are spread over the ranks, and show what each rank keeps."""
    rank, device = join(args)
    train_loader, test_loader = loaders(args)  # NEW: all ranks read the same batches
    torch.manual_seed(args.seed)  # the same on all ranks, because each keeps a part of the model
    image, _ = train_loader.dataset[0]
    stage, shapes = make_stage(make_layers(args), rank, image)
    passes = lists_of(args, dist.get_world_size())[rank]
    model = Pipeline(stage.to(device), shapes, passes, timedelta(seconds=args.timeout))
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    show_stages(model)
    dist.destroy_process_group()


def make_stage(layers, rank, image):
    """Return the stage of this rank, and the shapes of an image, and of what it receives for it."""
    stages = cut(layers, dist.get_world_size())
    # NEW: a rank must know the shape of a message before it can receive one. So it computes an
    # image with the stages before its own. Then it drops all stages but its own.
    activations = image[None]  # a batch of one
    with torch.no_grad():
        for stage in stages[:rank]:
            activations = stage.eval()(activations)
    return stages[rank], (image.shape, activations.shape[1:])


def cut(layers, count):
    """Cut an nn.Sequential into stages with about the same number of layers with parameters.

    What your forward() does between layers, such as a reshape, must become a layer. One tensor
    passes from stage to stage. (torchtitan copies the model for each stage, and deletes the layers
    of other stages, which its forward() then leaves out.)
    """
    indices = possible_starts(layers)
    if count > len(indices):
        raise ValueError(f"{count} stages, but only {len(indices)} layers have parameters")
    starts = [indices[number * len(indices) // count] for number in range(1, count)]
    stages = [layers[start:end] for start, end in pairwise([0, *starts, len(layers)])]
    if sum(len([*stage.parameters()]) for stage in stages) > len([*layers.parameters()]):
        raise ValueError("two stages share a parameter, and each would train its own copy")
    return stages


def possible_starts(layers):
    """Return the indices at which a stage can start: the layers that have parameters."""
    return [index for index, layer in enumerate(layers) if list(layer.parameters())]


def lists_of(args, world_size):
    """Return the passes of all ranks: those of a schedule in SCHEDULES, or those that are given."""
    if len(args.schedule) == 1 and args.schedule[0] in SCHEDULES:
        passes_of = SCHEDULES[args.schedule[0]]
        return [passes_of(rank, world_size, args.micro_batches) for rank in range(world_size)]
    return [passes.split(",") for passes in args.schedule]


def run_epoch(model, loader, device, optimizer=None):
    """Train, or with no optimizer, test. Returns sums over all ranks: loss, correct, images."""
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if optimizer is not None:
            optimizer.zero_grad()
        with torch.set_grad_enabled(model.training):
            logits = model(images, labels)  # NEW: forward and backward passes
        if optimizer is not None:
            # To clip gradients here, add up the squares of the norms of all ranks first.
            optimizer.step()
        if logits is not None:  # NEW: only the last rank has them
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += (labels >= 0).sum()  # those that count
    dist.all_reduce(sums)  # NEW: now all ranks have the sums
    return sums.tolist()


# You can stop here: what follows only prints, and reads and checks the flags.


def show_stages(model):
    """Print what each rank computes in a step, and what it keeps."""
    passes = f"rank {model.rank}: {' '.join(model.passes)}"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    most = "1 micro-batch" if model.most_kept == 1 else f"{model.most_kept} micro-batches"
    keeps = f"{parameters:,} parameters, and the activations of at most {most}"
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (passes, f"rank {model.rank} keeps {keeps}"))
    if model.rank == 0:
        for each in zip(*rows, strict=True):
            print(*each, sep="\n", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    help = "GPipe, 1F1B, or a list for each rank, as in --schedule F0,F1,B0,B1 F0,B0,F1,B1"
    add("--schedule", nargs="+", default=["GPipe"], metavar="LIST", help=help)
    help = "micro-batches in a batch (ignored with your own lists)"
    add("--micro_batches", type=flags.positive, default=8, help=help)


def check_flags(parser, args, world_size):
    """Refuse more stages than layers, and passes that cannot work.

    Every rank reads the whole batch, so its size need not fit the number of ranks.
    """
    with torch.device("meta"):  # layers without memory
        most = len(possible_starts(make_layers(args)))
    if world_size > most:
        few = f"{world_size} stages, but only {most} layers have parameters"
        parser.error(f"{few}: start fewer processes, or use a larger --layers")
    lists = lists_of(args, world_size)
    if len(lists) != world_size:
        wrong = f"{world_size} ranks need GPipe, 1F1B, or {world_size} lists such as F0,F1,B0,B1"
        parser.error(f"--schedule: {wrong}")
    micro_batches = max(1, ",".join(lists[0]).count("F"))
    if micro_batches > args.batch_size:
        parser.error(f"{micro_batches} micro-batches, but a batch has {args.batch_size} images")
    needed = gpipe(0, world_size, micro_batches)
    for rank, passes in enumerate(lists):
        # Messages arrive in the order of sending, so all ranks need the same order.
        sends = [each.replace("I", "B") for each in passes if not each.startswith("W")]
        forward = [each for each in sends if each.startswith("F")]
        backward = [each for each in sends if not each.startswith("F")]
        fits = forward + backward == needed
        for number in range(micro_batches):
            fits = fits and sends.index(f"F{number}") < sends.index(f"B{number}")
            halves = [each for each in passes if each in (f"I{number}", f"W{number}")]
            fits = fits and halves in ([], [f"I{number}", f"W{number}"])
        if not fits:
            once = f"{' '.join(needed)}, each once, all F and all B in this order, B0 after F0"
            parser.error(f"--schedule: rank {rank} needs {once}")


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), fit_epoch() and main(). If you copy this lesson, copy this, too.


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
