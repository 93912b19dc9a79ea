r"""A pipeline with torch.distributed.pipelining, and six of its schedules.

Run it, with one stage on each rank, and with two:
    torchrun --standalone --nproc-per-node 2 playground/split/pipeline_parallel.py
    torchrun --standalone --nproc-per-node 2 playground/split/pipeline_parallel.py \
        --schedule Interleaved1F1B

Both print the same numbers as `single_gpu.py`, up to rounding (with --double all twelve digits
agree). Then each shows what its ranks keep, here the second one. The first layer has most of the
parameters:
    rank 0 keeps stages 0 and 2: 54,400 parameters
    rank 1 keeps stages 1 and 3: 4,810 parameters

`manual_pipeline.py` sends activations and gradients by hand. Here each stage is a `PipelineStage`,
which sends and receives, and one of six schedules says when a rank computes which micro-batch:

  GPipe                  computes all forward passes, then all backward passes. The last of p ranks
                         starts p-1 turns after the first one, so the forward passes of m
                         micro-batches take m+p-1 turns, and so do the backward passes. A rank
                         computes in m of them, and waits for (p-1)/(m+p-1) of the time: the bubble.
  1F1B                   computes each backward pass as early as possible. The bubble is the same,
                         but a rank keeps the activations of p micro-batches at most, instead of m.
  Interleaved1F1B        gives each rank two stages of half the size. So the first micro-batch
                         reaches the last rank in half the time, which makes the bubble about half
                         as large, for more messages: with two ranks, three times as many
                         (https://arxiv.org/abs/2104.04473).
  InterleavedZeroBubble  also splits each backward pass: first the input's gradient, for which the
                         previous rank waits, and later, when a rank would wait, those of the
                         parameters (https://arxiv.org/abs/2401.10241).
  ZBVZeroBubble          splits backward passes in the same way, but its stages run from rank 0 to
                         the last rank and back, as a V: with two ranks, rank 0 keeps the stages 0
                         and 3, and rank 1 keeps 1 and 2. So rank 0 computes the loss, and at the
                         tip of the V no message is needed.
  DualPipeV              has the same V. It pairs a forward pass of one stage with a backward pass
                         of the other, so that one could compute while messages of the other travel
                         (https://arxiv.org/abs/2412.19437). PyTorch computes one after the other.

Try breaking it, in a copy beside it:
  1. Leave out `, target=labels` in `self.schedule.step(...)`. Which rank fails, and why only that
     one?
  2. Try --micro_batches 2, 4, 16 and 64. The bubble of the formula shrinks. Do the images/s rise?
     `playground/tools/watch.py` in front of the script shows where each rank waits.

Builds on: manual_pipeline.py
The next lesson, `tensor_parallel.py`, splits linear layers instead of the list of layers.
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
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # find common/ from any folder
from common import flags
from common.data import fetch, loaders
from common.models import make_layers

STAGES_PER_RANK = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


class Pipeline(torch.nn.Module):
    """The stages of this rank, and a schedule that runs them together with those of other ranks.

    Args:
        parts: all stages of the model. This rank keeps one of them, or two.
        device: of this rank.
        name: of the schedule.
        micro_batches: in a batch.
    """

    def __init__(self, parts, device, name, micro_batches):
        super().__init__()
        # NEW: of p ranks, rank r keeps stage r, or the stages r and r + p. So every stage sends its
        # output to the next rank, and the last rank sends that of stage p - 1 to rank 0.
        rank = dist.get_rank()
        self.numbers = range(rank, len(parts), dist.get_world_size())
        self.v_shaped = name in V_SHAPED
        if self.v_shaped:
            # NEW: in a V, the second half of the stages runs back from the last rank to rank 0.
            self.numbers = (rank, len(parts) - 1 - rank)
        self.stages = torch.nn.ModuleList(parts[number] for number in self.numbers)
        self.stages.to(device)
        self.connected = []
        for number, stage in zip(self.numbers, self.stages, strict=True):
            # NEW: a PipelineStage receives the stage's inputs, and sends its output.
            self.connected.append(PipelineStage(stage, number, len(parts), device))
        # NEW: a schedule computes the passes of all stages of this rank, and after the last stage
        # the loss, here the mean over the images of a micro-batch. It divides the sum of all
        # micro-batches' gradients by their number. Because micro-batches have equal sizes, this is
        # the gradient of the mean over the batch.
        schedule_class = schedules.get_schedule_class(name)
        if issubclass(schedule_class, schedules.PipelineScheduleMulti):  # two stages on each rank
            self.schedule = schedule_class(self.connected, micro_batches, F.cross_entropy)
        else:
            self.schedule = schedule_class(self.connected[0], micro_batches, F.cross_entropy)

    def forward(self, images, labels):
        """Compute a batch, and in training its gradients, too.

        All ranks have the whole batch. The rank of the first stage computes with the images. That
        of the last stage computes with the labels, and only that rank returns logits.
        """
        # NEW: rank 0 has the first stage, which takes images. All others receive activations.
        inputs = [images] if dist.get_rank() == 0 else []
        if self.training:
            # NEW: all forward and backward passes of the batch, in the order of the schedule
            return self.schedule.step(*inputs, target=labels)
        if self.v_shaped:
            # In a V, eval() fails (torch 2.14 and 2.15). So compute gradients here, too. Nothing
            # uses them, and the next zero_grad() drops them.
            with torch.enable_grad():
                return self.schedule.step(*inputs, target=labels)
        return self.schedule.eval(*inputs, target=labels)


def train(args):
    """Train a model whose layers are spread over the ranks, and show what each rank keeps."""
    rank, device = join(args)
    train_loader, test_loader = same_size_loaders(args)  # NEW: all ranks read the same batches
    # The same seed on all ranks, because each keeps some stages of the same random parameters.
    torch.manual_seed(args.seed)
    count = dist.get_world_size() * STAGES_PER_RANK[args.schedule]
    model = Pipeline(cut(make_layers(args), count), device, args.schedule, args.micro_batches)
    torch.manual_seed(args.seed + rank)  # dropout, if there is any, must differ between ranks
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6, fused=True)
    connect(model, train_loader, device)
    fit(model, optimizer, train_loader, test_loader, device, args)
    show_stages(model)
    dist.destroy_process_group()


def cut(layers, count):
    """Cut an nn.Sequential into stages, as in manual_pipeline.py."""
    starts = possible_starts(layers)
    inner = [starts[number * len(starts) // count] for number in range(1, count)]
    stages = [layers[start:end] for start, end in pairwise([0, *inner, len(layers)])]
    in_stages = sum(len(list(stage.parameters())) for stage in stages)
    if in_stages > len(list(layers.parameters())):
        raise ValueError("two stages share a parameter, and each rank would train its own copy")
    return stages


def possible_starts(layers):
    """Return the indices at which a stage can start: one for each layer that has parameters."""
    starts = []
    for index, layer in enumerate(layers):
        if list(layer.parameters()):
            # NEW: InterleavedZeroBubble changes a stage's output in place, which PyTorch forbids if
            # it is a view, such as Flatten's output. So Flatten begins the next stage.
            after_flatten = index > 0 and isinstance(layers[index - 1], torch.nn.Flatten)
            starts.append(index - 1 if after_flatten else index)
    return starts


def same_size_loaders(args):
    """Return loaders of whole batches, those for testing of the same size as those for training.

    The stages take batches of one size only, so the last test batch is filled up.
    """
    train_loader, test_loader = loaders(args)
    filled = partial(fill, args.batch_size)
    return train_loader, DataLoader(test_loader.dataset, args.batch_size, collate_fn=filled)


def fill(batch_size, batch):
    """Add images to a batch until it has this size. They have the label -100."""
    images, labels = batch
    missing = batch_size - len(labels)
    more_images = images.new_zeros(missing, *images.shape[1:])
    # cross_entropy leaves the label -100 out.
    more_labels = labels.new_full((missing, *labels.shape[1:]), -100)
    return torch.cat([images, more_images]), torch.cat([labels, more_labels])


def connect(model, train_loader, device):
    """Run a step in advance, only for a bug of PyTorch 2.9. Newer versions do not need it.

    In its first step, version 2.9 sends 8-byte numbers into a tensor of the default dtype. With
    float64 the sizes agree. This step changes no parameter, but batch norm, if there were any,
    would count its images. https://github.com/pytorch/pytorch/pull/165539
    """
    images, labels = next(iter(train_loader))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model(images.to(device), labels.to(device))
    finally:
        torch.set_default_dtype(before)
    model.zero_grad()


def run_epoch(model, loader, device, optimizer=None):
    """Train, or only test if there is no optimizer.

    Returns three sums over all images: the loss, the number classified correctly, the number of
    images.
    """
    model.train(optimizer is not None)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for images, labels in loader:
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        if optimizer is not None:
            optimizer.zero_grad()
        with torch.set_grad_enabled(model.training):
            logits = model(images, labels)
        if optimizer is not None:
            # To clip gradients here, add up the squares of the norms of all ranks first.
            optimizer.step()
        if logits is not None:
            logits = logits.detach()
            sums[0] += F.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(dim=1) == labels).sum()
            sums[2] += (labels >= 0).sum()  # NEW: without the images that fill() has added
    dist.all_reduce(sums)
    return sums.tolist()


def show_stages(model):
    """Print what each rank keeps."""
    name = "stage" if len(model.numbers) == 1 else "stages"
    numbers = " and ".join(str(number) for number in model.numbers)
    kept = sum(parameter.numel() for parameter in model.parameters())
    rows = [None] * dist.get_world_size()
    row = f"rank {dist.get_rank()} keeps {name} {numbers}: {kept:,} parameters"
    dist.all_gather_object(rows, row)
    if dist.get_rank() == 0:
        print(*rows, sep="\n", flush=True)


def add_flags(parser):
    """Add the flags that only this lesson has."""
    add = parser.add_argument
    add("--schedule", choices=STAGES_PER_RANK, default="GPipe")
    add("--micro_batches", type=flags.positive, default=8, help="micro-batches in a batch")


def check_flags(parser, args, world_size):
    """Refuse what a schedule cannot run. Only micro-batches must divide the batch."""
    count = args.micro_batches
    v_shaped = args.schedule in V_SHAPED
    if v_shaped and torch.__version__.startswith("2.9."):
        parser.error(f"torch 2.9 cannot run --schedule {args.schedule}: use a newer version")
    circular = STAGES_PER_RANK[args.schedule] > 1 and not v_shaped
    if circular and world_size == 1:
        parser.error(f"--schedule {args.schedule} needs 2 ranks or more")
    stages = world_size * STAGES_PER_RANK[args.schedule]
    with torch.device("meta"):  # layers without memory
        most = len(possible_starts(make_layers(args)))
    if stages > most:
        few = f"{stages} stages, but only {most} layers have parameters"
        parser.error(f"{few}: start fewer processes, or use a larger --layers")
    near = max(1, round(count / world_size)) * world_size
    if circular and count % world_size:
        wrong = f"{args.schedule} needs a multiple of {world_size}, the number of ranks"
        parser.error(f"--micro_batches {count}: {wrong}: use --micro_batches {near}")
    if args.schedule == "DualPipeV" and count < stages:
        wrong = f"{args.schedule} needs one for each stage"
        parser.error(f"--micro_batches {count}: {wrong}: use --micro_batches {stages}")
    if count < world_size and not v_shaped:
        wrong = f"{args.schedule} needs one for each rank"
        parser.error(f"--micro_batches {count}: {wrong}: use --micro_batches {near}")
    if args.batch_size % count:
        near = max(1, round(args.batch_size / count)) * count
        wrong = f"{count} micro-batches cannot divide --batch_size {args.batch_size}"
        parser.error(f"{wrong}: use --batch_size {near}")


# ---------- Unchanged from distributed_data_parallel_torchrun.py ----------
# You know what follows: join(), fit() and main(). If you copy this lesson, copy it, too.


def join(args):
    """Join the process group that torchrun describes. Returns this rank and its device."""
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun has numbered this node's processes
    device = torch.device(args.device)
    gpu = None
    if args.device != "cpu":
        gpu = device = torch.device(args.device, local_rank)
        torch.accelerator.set_device_index(gpu)  # otherwise all ranks would take memory on GPU 0
    backend = dist.get_default_backend_for_device(device)  # nccl for NVIDIA's GPUs, gloo for CPUs
    # The address, the rank and the world size are in the environment.
    dist.init_process_group(backend, timeout=timedelta(seconds=args.timeout), device_id=gpu)
    rank = dist.get_rank()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, vars(args))
    flags.check_same(everyone)  # an error, if nodes have different flags
    if rank == 0:
        print(f"{len(everyone)} ranks, {backend}, {args.device}", flush=True)
    return rank, device


def fit(model, optimizer, train_loader, test_loader, device, args):
    """Train and test, and print one line for each epoch."""
    rank = dist.get_rank()
    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)  # a new order, the same on all ranks
        start = time.perf_counter()
        # Only rank 0 shows a bar, and only in a terminal.
        bar = tqdm(train_loader, leave=False, disable=None if rank == 0 else True)
        loss, correct, images = run_epoch(model, bar, device, optimizer)
        seconds = time.perf_counter() - start
        speed = len(train_loader) * args.batch_size / seconds
        # A wrapper such as DDP may send messages in forward(), so test the model that it wraps.
        plain = getattr(model, "module", model)
        _, test_correct, test_images = run_epoch(plain, test_loader, device)
        if rank == 0:
            digits = 12 if args.double else 4
            print(
                f"epoch {epoch + 1}/{args.epochs}  loss {loss / images:.{digits}f}"
                f"  train {correct / images:.2%}  test {test_correct / test_images:.2%}"
                f"  {seconds:.2f} s  {speed:,.0f} {args.unit}/s",
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
    # There is no group yet, so a download may take long. One process of each node does it.
    args.dataset = fetch(args.dataset, args.data_dir, args.batch_size)
    train(args)


if __name__ == "__main__":
    main()
