r"""A pipeline with `torch.distributed.pipelining`: first with 1F1B, then with five other schedules.

Run it, with one stage on each rank, and with two:
    torchrun --standalone --nproc-per-node 2 playground/split/pipeline_parallel.py --micro_batches 4
    torchrun --standalone --nproc-per-node 2 playground/split/pipeline_parallel.py \
        --micro_batches 4 --schedule InterleavedZeroBubble

Both print the same numbers as `single_gpu.py`, up to rounding (with `--double` all twelve digits
agree; batch norm would see one micro-batch at a time). Then each shows what its ranks compute in a
step, as `manual_pipeline.py` does, and what they keep. With the first command:
    rank 0: F0 F1 B0 F2 B1 F3 B2 B3
    rank 1: F0 B0 F1 B1 F2 B2 F3 B3
    rank 0 keeps stage 0: 54,400 parameters
    rank 1 keeps stage 1: 4,810 parameters

`manual_pipeline.py` sends activations and gradients by hand. Here a `PipelineStage` sends and
receives them, and a schedule says when a rank computes which micro-batch: by default 1F1B, which
you know. The others change the bubble (`model_parallel.py`), or what a rank keeps
(`playground/pages/figures/schedules.svg` shows four ranks):

- `GPipe` has the same bubble, and keeps the activations of all micro-batches.
- `Interleaved1F1B` has two stages on each rank, half as long: 2F1 is micro-batch 1 in stage 2. That
  is about half the bubble, and more messages (https://arxiv.org/abs/2104.04473).
  `interleaved()` below is the rule. With 4 micro-batches, rank 0 computes
  0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
- `InterleavedZeroBubble` also splits each backward pass into I and W (`manual_pipeline.py`), and
  fills the bubble with W.
- `ZBVZeroBubble` splits them, too, and its stages run from rank 0 to the last rank and back, as a
  V. So rank 0 has the first stage and the last one.
- `DualPipeV` is such a V. In the middle of a step, a forward pass of one stage is paired with a
  backward pass of the rank's other stage, so that one can compute while messages of the other
  travel (https://arxiv.org/abs/2412.19437). By default, PyTorch computes one after the other.

Try breaking it, in a copy beside it:
  1. In `Pipeline.forward()`, leave out `, target=labels`. Which rank fails, and why only that one?
  2. Try `--micro_batches 2`, 4, 16 and 64. The bubble shrinks. Do the images/s rise?
     `playground/tools/watch.py` in front of the script shows where each rank waits.
  3. Use `--schedule DualPipeV --micro_batches 4`. Which passes of rank 0 are pairs?

Builds on: manual_pipeline.py
The next lesson, `placements.py`, shows how one tensor can lie on several ranks.
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import Images, fetch, loaders, whole_batch
from common.models import make_layers

STAGES_PER_RANK = {
    "1F1B": 1,
    "GPipe": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def make_1f1b(layers, device, micro_batches):
    """Return a pipeline with the schedule 1F1B, and the stage of this rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    module = cut(layers, world_size)[rank].to(device)
    # NEW: sends and receives activations, and in the backward pass their gradients. With the first
    # batch, it finds out their shapes and dtypes, which all later ones must have.
    stage = PipelineStage(module, rank, world_size, device)
    # NEW: computes the passes of all micro-batches, and on the last rank the loss of each.
    # (`partial`: Pipeline adds loss_fn and scale_grads.)
    return Pipeline([stage], partial(Schedule1F1B, stage, micro_batches))


def make_other(name, layers, device, micro_batches):
    """Return a pipeline with the schedule of this name, and the stages of this rank."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    count = world_size * STAGES_PER_RANK[name]
    modules = cut(layers, count)
    splits = name not in ("GPipe", "Interleaved1F1B")  # a backward pass into I and W
    if splits and not any(each.requires_grad for each in modules[0].parameters()):
        raise ValueError(f"{name}: wrong gradients behind a frozen stage: use Interleaved1F1B")
    # With two ranks, rank 0 has stages 0 and 2, and rank 1 has 1 and 3. So every stage sends its
    # output to the next rank, and the last rank sends that of its first stage to rank 0. In a V,
    # rank 0 has 0 and 3, and rank 1 has 1 and 2.
    numbers = range(rank, count, world_size)
    if name in V_SHAPED:
        numbers = (rank, count - 1 - rank)
    stages = []
    for number in numbers:
        stages.append(PipelineStage(modules[number].to(device), number, count, device))
    taken = stages if STAGES_PER_RANK[name] > 1 else stages[0]  # two stages: a list
    make_schedule = partial(get_schedule_class(name), taken, micro_batches)
    kind = VPipeline if name in V_SHAPED else Pipeline
    return kind(stages, make_schedule)


class Pipeline(torch.nn.Module):
    """The stages of this rank, and the schedule that runs them with those of the other ranks."""

    def __init__(self, stages, make_schedule):
        super().__init__()
        self.stages = stages
        self.layers = torch.nn.ModuleList(stage.submod for stage in stages)  # for parameters()
        # NEW: by default, a schedule divides the gradients by the number of micro-batches, which is
        # right for means, if all micro-batches have equally many labels.
        self.schedule = make_schedule(loss_fn=self.loss, scale_grads=False)

    def loss(self, logits, labels):
        """Return what a micro-batch adds to the mean loss over the batch."""
        return F.cross_entropy(logits, labels, reduction="sum") / self.count

    def forward(self, images, labels):
        """Compute a batch, and in training its gradients, too.

        All ranks have the whole batch. The first stage computes with the images, and the last one
        with the labels. Only the rank of the last stage returns logits.
        """
        self.count = (labels != -100).sum()  # -100 is for what has no label
        inputs = [images] if self.stages[0].is_first else []  # NEW: others receive activations
        # NEW: all forward and backward passes of the batch, in the order of the schedule
        run = self.schedule.step if self.training else self.schedule.eval
        logits = run(*inputs, target=labels)  # with their graph
        return None if logits is None else logits.detach()


def train(args):
    """Train a model whose layers are spread over the ranks, and show what each rank keeps."""
    rank, device = join(args)
    train_loader, test_loader = same_size_loaders(args)  # NEW: all ranks read the same batches
    # The same seed on all ranks, because each keeps some layers of the same random model.
    torch.manual_seed(args.seed)
    if args.schedule == "1F1B":
        model = make_1f1b(make_layers(args), device, args.micro_batches)
    else:
        model = make_other(args.schedule, make_layers(args), device, args.micro_batches)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    for epoch in range(args.epochs):
        fit_epoch(epoch, model, optimizer, train_loader, test_loader, device, args)
    show_passes(model, train_loader, device)
    show_stages(model)
    dist.destroy_process_group()


def possible_starts(layers):
    """Return the indices at which a stage can start: one for each layer that has parameters."""
    starts = []
    for index, layer in enumerate(layers):
        if list(layer.parameters()):
            # InterleavedZeroBubble changes a stage's output in place, which PyTorch forbids if it
            # is a view, such as Flatten's output. So Flatten begins the next stage.
            after_flatten = index > 0 and isinstance(layers[index - 1], torch.nn.Flatten)
            starts.append(index - 1 if after_flatten else index)
    return starts


def interleaved(rank, world_size, micro_batches, chunks=2):
    """Return the passes of a rank with Interleaved1F1B. Its stages are called its chunks.

    Only to read: PyTorch's schedule computes this list itself.
    """
    if micro_batches % world_size:
        raise ValueError("this rule is for a multiple of world_size micro-batches")
    stages = range(rank, chunks * world_size, world_size)
    forward = []
    backward = []
    # NEW: world_size micro-batches pass through one chunk of a rank, and then through its next one.
    for first in range(0, micro_batches, world_size):
        for chunk in range(chunks):
            for number in range(first, first + world_size):
                forward.append(f"{stages[chunk]}F{number}")
                backward.append(f"{stages[-1 - chunk]}B{number}")
    # NEW: forward passes before the first backward pass: those up to micro-batch 0 in the last
    # chunk, and one for each turn until its gradient is back from the ranks behind this one.
    ahead = (chunks - 1) * world_size + 2 * (world_size - rank - 1) + 1
    passes = forward[:ahead]
    for number, each in enumerate(backward):
        passes.append(each)
        if ahead + number < len(forward):
            passes.append(forward[ahead + number])
    return passes


# You can stop here: what follows is for V shapes, prints, and reads the flags.


class VPipeline(Pipeline):
    """A pipeline in a V, where the schedule's eval() fails (torch 2.14 and 2.15)."""

    @torch.enable_grad()
    def forward(self, images, labels):
        """Compute a batch and its gradients. In a test, these are dropped."""
        self.count = (labels != -100).sum()
        inputs = [images] if self.stages[0].is_first else []
        logits = self.schedule.step(*inputs, target=labels)
        if not self.training:
            self.zero_grad()
        return None if logits is None else logits.detach()


def same_size_loaders(args):
    """Return loaders whose batches all have the same size, because stages take only one size.

    The last test batch is filled up with images that have the label -100, which cross_entropy
    leaves out.
    """
    train_loader, test_loader = loaders(args)
    images, labels = test_loader.dataset.images, test_loader.dataset.labels
    missing = -len(labels) % args.batch_size
    more_images = images.new_zeros(missing, *images.shape[1:])
    more_labels = labels.new_full((missing, *labels.shape[1:]), -100)
    filled = Images(torch.cat([images, more_images]), torch.cat([labels, more_labels]))
    return train_loader, DataLoader(filled, args.batch_size, collate_fn=whole_batch)


def show_passes(model, loader, device):
    """Print which passes each rank computes in a step, in their order."""
    passes = []
    for stage in model.stages:
        number = "" if len(model.stages) == 1 else stage.stage_index
        note_calls(stage, number, passes)
    images, labels = next(iter(loader))
    model.train()
    model(images.to(device), labels.to(device))  # the gradients are not used
    rows = [None] * dist.get_world_size()
    dist.all_gather_object(rows, f"rank {dist.get_rank()}: {' '.join(passes)}")
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def note_calls(stage, number, passes):
    """Let a stage note each pass that its schedule calls, such as 2F0: stage 2, micro-batch 0.

    (`schedule.pipeline_order` is not what 1F1B computes: torch 2.14 lists F4 on the last of 2 ranks
    with 4 micro-batches, and no F0.)
    """
    for letter, name in (
        ("F", "forward_one_chunk"),
        ("B", "backward_one_chunk"),
        ("W", "backward_weight_one_chunk"),
    ):
        setattr(stage, name, partial(note, passes, f"{number}{letter}", getattr(stage, name)))


def note(passes, name, call, micro_batch, *args, **kwargs):
    """Note a pass, and let the stage compute it."""
    if not kwargs.get("full_backward", True):
        name = name.replace("B", "I")
    passes.append(f"{name}{micro_batch}")
    return call(micro_batch, *args, **kwargs)


def show_stages(model):
    """Print what each rank keeps."""
    name = "stage" if len(model.stages) == 1 else "stages"
    numbers = " and ".join(str(stage.stage_index) for stage in model.stages)
    kept = sum(parameter.numel() for parameter in model.parameters())
    rows = [None] * dist.get_world_size()
    row = f"rank {dist.get_rank()} keeps {name} {numbers}: {kept:,} parameters"
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    add("--schedule", choices=STAGES_PER_RANK, default="1F1B")
    add("--micro_batches", type=flags.positive, default=8, help="micro-batches in a batch")


def check_flags(parser, args, world_size):
    """Refuse what a schedule cannot run. Only micro-batches must divide the batch."""
    name = args.schedule
    count = args.micro_batches
    if torch.__version__.startswith("2.9."):
        # In its first step, 2.9 sends 8-byte numbers into a tensor of the default dtype:
        # https://github.com/pytorch/pytorch/pull/165539
        words = "torch 2.9 cannot run this lesson"
        parser.error(f"{words}: use a newer version")
    circular = name.startswith("Interleaved")
    if circular and world_size == 1:
        parser.error(f"--schedule {name} needs 2 ranks or more")
    stages = world_size * STAGES_PER_RANK[name]
    with torch.device("meta"):  # layers without memory
        most = len(possible_starts(make_layers(args)))
    if stages > most:
        few = f"{stages} stages, but only {most} layers have parameters"
        parser.error(f"{few}: start fewer processes, or use a larger --layers")
    multiple = world_size if circular else 1
    least = stages if name == "DualPipeV" else world_size
    if count < least or count % multiple:
        near = max(least, round(count / multiple) * multiple)
        wrong = f"{name} needs {least} or more"
        if multiple > 1:
            wrong += f", and a multiple of {multiple}"
        parser.error(f"--micro_batches {count}: {wrong}: use --micro_batches {near}")
    if args.batch_size % count:
        near = max(1, round(args.batch_size / count)) * count
        wrong = f"{count} micro-batches cannot divide --batch_size {args.batch_size}"
        parser.error(f"{wrong}: use --batch_size {near}")


# ---------- Unchanged from manual_pipeline.py ----------
# You know what follows: cut() and run_epoch(). If you copy this lesson, copy this, too.


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
            logits = model(images, labels)  # forward and backward passes
        if optimizer is not None:
            # To clip gradients here, add up the squares of the norms of all ranks first.
            optimizer.step()
        if logits is not None:  # only the last rank has them
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += (labels >= 0).sum()  # those that count
    dist.all_reduce(sums)  # now all ranks have the sums
    return sums.tolist()


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
