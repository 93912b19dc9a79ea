"""Seven lessons without anything around their training.

A bare program uses the same PyTorch classes as its lesson. It trains on the same shuffled batches,
counts the same losses and hits, and prints the same numbers. It has no DataLoader, no flags, no
progress bar and no checkpoint. The MLP is written out, and so is the choice of each batch. The
transformer and the language model are those of common/.

    python tests/programs/bare.py single_gpu mnist data 128 3
    torchrun --standalone --nproc-per-node 2 tests/programs/bare.py ddp mnist data 128 3

The arguments are the kind of program (single_gpu, ddp, fsdp, tensor, pipeline, transformer or
language), the data set, its folder, the global batch and the epochs. The transformer is trained
with DDP, and the language model by one process, on the data set "text". The pipeline needs two
ranks. single_gpu also takes a device: with "cuda" all images lie on the GPU.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torchvision.datasets import MNIST


def read(dataset, data_dir):
    """Return normalised training images, their labels, test images, their labels."""
    if dataset in ("digits", "text"):  # for a test of the numbers, so common/ may read them
        from common.data import load

        train_set, test_set = load(dataset, data_dir)
        return [train_set.images, train_set.labels, test_set.images, test_set.labels]
    tensors = []
    for part in (MNIST(data_dir, train=True), MNIST(data_dir, train=False)):
        images = part.data.unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081)
        tensors += [images, part.targets]
    return tensors


def make_model(kind):
    """Return the model of a kind."""
    torch.manual_seed(0)
    if kind == "language":
        from common.models import Language

        return Language()
    if kind == "transformer":
        from common.models import Transformer

        return Transformer()
    layers = [nn.Flatten()]
    for inputs in (784, 64, 64):
        layers += [nn.Linear(inputs, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def parallelize(kind, model):
    """Prepare the model for a kind of parallelism, which is imported here, where it is needed."""
    if kind in ("ddp", "transformer"):
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model[1::2]:
            fully_shard(layer)
        return fully_shard(model)
    if kind == "tensor":
        from torch.distributed.tensor import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        plan |= {"5": ColwiseParallel(), "7": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    return model


def make_schedule(model):
    """Return the schedule of a pipeline: two of the four linear layers on each of two ranks."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    part = model[:5] if rank == 0 else model[5:]
    return ScheduleGPipe(PipelineStage(part, rank, 2, torch.device("cpu")), 8, F.cross_entropy)


def in_order(images, labels, order, batch_size):
    """Yield the batches of an epoch."""
    for places in order.split(batch_size):
        yield images.index_select(0, places), labels.index_select(0, places)


def in_equal_batches(images, labels, batch_size):
    """Return all images for a pipeline. Images without a label fill up the last batch."""
    missing = -len(labels) % batch_size
    images = F.pad(images, [0, 0, 0, 0, 0, 0, 0, missing]).split(batch_size)
    labels = F.pad(labels, [0, missing], value=-1).split(batch_size)
    return list(zip(images, labels, strict=True))


def train_epoch(model, schedule, optimizer, batches, device):
    """Train on batches of images and labels. Returns the sum of losses, and of hits.

    In a pipeline (which has a schedule), the last rank has the sums, and the first has 0.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    for images, labels in batches:
        optimizer.zero_grad()
        if schedule is None:
            logits = model(images)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
        elif dist.get_rank() == 0:
            schedule.step(images)
            optimizer.step()
            continue
        else:
            logits = schedule.step(target=labels)
            loss = F.cross_entropy(logits.detach(), labels)
        optimizer.step()
        totals[0] += loss.detach() * labels.numel()
        totals[1] += (logits.argmax(dim=1) == labels).sum()
    return totals


@torch.no_grad()
def count_hits(model, schedule, batches, device):
    """Return how many images the model recognizes. In a pipeline, the last rank knows it."""
    hits = torch.tensor(0, device=device)
    for images, labels in batches:
        if schedule is None:
            hits += (model(images).argmax(dim=1) == labels).sum()
        elif dist.get_rank() == 0:
            schedule.eval(images)
        else:
            logits = schedule.eval(target=labels.clamp(min=0))
            hits += (logits.argmax(dim=1) == labels).sum()
    return hits


def main():
    """Read the data, train and test, and print a line for each epoch as the lessons do."""
    kind, dataset, data_dir, *numbers = sys.argv[1:]
    device = numbers.pop() if len(numbers) == 3 else "cpu"
    batch_size, epochs = map(int, numbers)
    if kind not in ("single_gpu", "language"):
        dist.init_process_group("gloo")
    rank, world_size = 0, 1
    if dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    model = make_model(kind)
    schedule = make_schedule(model) if kind == "pipeline" else None
    model = parallelize(kind, model.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, fused=True)

    split_data = kind in ("ddp", "fsdp", "transformer")
    summed = world_size > 1 and kind != "tensor"
    own_batch = batch_size // world_size if split_data else batch_size
    data = [tensor.to(device) for tensor in read(dataset, data_dir)]
    images, labels, *tests = data
    unit = "tokens" if kind == "language" else "images"
    each = labels[0].numel()  # an image has one label, and a row of the text one for each token
    trained, tested = len(labels), tests[1].numel()
    tests = [[part[rank::world_size] for part in tests]] if split_data else [tests]
    if schedule:
        tests = in_equal_batches(*tests[0], batch_size)
    trained -= trained % batch_size
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch - 1))
        order = order[:trained].to(device)
        if split_data:
            order = order[rank::world_size]
        batches = in_order(images, labels, order, own_batch)
        totals = train_epoch(model, schedule, optimizer, batches, device)
        if summed:
            dist.all_reduce(totals)
        loss, hits = (totals / trained / each).tolist()
        seconds = time.perf_counter() - start
        test_hits = count_hits(model, schedule, tests, device)
        if summed:
            dist.all_reduce(test_hits)
        if rank == 0:
            numbers = f"loss {loss:.4f}  train {hits:.2%}  test {test_hits.item() / tested:.2%}"
            speed = f"{seconds:.2f} s  {trained * each / seconds:,.0f} {unit}/s"
            print(f"epoch {epoch}/{epochs}  {numbers}  {speed}", flush=True)
    if world_size > 1:
        del model, schedule  # DDP refers to the group
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # find common/
    main()
