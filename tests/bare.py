"""Six lessons without anything around their training. benchmark.py compares the lessons with them.

A bare program uses the same PyTorch classes as its lesson. It trains on the same shuffled batches,
counts the same losses and hits, and prints the same numbers. It has no DataLoader, no flags, no
progress bar and no checkpoint. The MLP is written out, and so is the choice of each batch. The
transformer is that of common/models.py.

    python tests/bare.py single_gpu mnist data 128 3
    torchrun --standalone --nproc-per-node 2 tests/bare.py ddp mnist data 128 3

The arguments are the kind of program (single_gpu, ddp, fsdp, tensor, pipeline or transformer), the
data set, its folder, the global batch and the epochs. The transformer is trained with DDP. The
pipeline needs two ranks. single_gpu also takes a device: with "cuda" all images lie on the GPU.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MICRO_BATCHES = 8


def read(dataset: str, data_dir: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images, training labels, test images and test labels.

    Images are float32, (N, 1, 28, 28), and normalised. Labels are int64, (N,).
    """
    if dataset == "digits":  # for a test of the numbers, so common/ may read them
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        from common.data import load

        train_set, test_set = load(dataset, data_dir)
        return train_set.images, train_set.labels, test_set.images, test_set.labels
    from torchvision.datasets import MNIST

    tensors = []
    for part in (MNIST(data_dir, train=True), MNIST(data_dir, train=False)):
        images = part.data.unsqueeze(1).float().div_(255).sub_(0.1307).div_(0.3081)
        tensors += [images, part.targets]
    return tuple(tensors)


def parallelize(kind: str, model: nn.Sequential) -> nn.Module:
    """Prepare the model for a kind of parallelism. It is imported here, where it is needed."""
    if kind in ("ddp", "transformer"):
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model)
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        return fully_shard(model)
    if kind == "tensor":
        from torch.distributed.tensor import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        plan = {"1": ColwiseParallel(), "3": RowwiseParallel()}
        plan |= {"5": ColwiseParallel(), "7": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    return model


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    order: Tensor,
    batch_size: int,
) -> Tensor:
    """Train on the images in this order. Returns two sums: the losses and the hits."""
    totals = torch.zeros(2, dtype=torch.float64, device=images.device)
    for batch in order.split(batch_size):
        batch_labels = labels.index_select(0, batch)
        logits = model(images.index_select(0, batch))
        loss = F.cross_entropy(logits, batch_labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        totals[0] += loss.detach() * len(batch)
        totals[1] += (logits.argmax(dim=1) == batch_labels).sum()
    return totals


def count_hits(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return how many images the model recognizes."""
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).sum()


class Pipeline:
    """Two stages with two of the four linear layers each, one stage on each of two ranks."""

    def __init__(self, model: nn.Sequential):
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        self.first = torch.distributed.get_rank() == 0
        part = model[:5] if self.first else model[5:]
        stage = PipelineStage(part, 0 if self.first else 1, 2, torch.device("cpu"))
        self.schedule = ScheduleGPipe(stage, MICRO_BATCHES, F.cross_entropy)

    def train_epoch(
        self,
        optimizer: torch.optim.Optimizer,
        images: Tensor,
        labels: Tensor,
        order: Tensor,
        batch_size: int,
    ) -> Tensor:
        """Train as the function of this name does. The last rank has the sums, the first has 0."""
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in order.split(batch_size):
            batch_labels = labels.index_select(0, batch)
            optimizer.zero_grad()
            if self.first:
                self.schedule.step(images.index_select(0, batch))
                optimizer.step()
            else:
                logits = self.schedule.step(target=batch_labels)
                optimizer.step()
                loss = F.cross_entropy(logits.detach(), batch_labels)
                totals[0] += loss * len(batch)
                totals[1] += (logits.argmax(dim=1) == batch_labels).sum()
        return totals

    def count_hits(self, images: Tensor, labels: Tensor, batch_size: int) -> Tensor:
        """Return how many images the model recognizes, on the last rank; the first returns 0."""
        hits = torch.tensor(0)
        # The stages take batches of one size only, so images without a label fill up the last one.
        missing = -len(labels) % batch_size
        images = F.pad(images, [0, 0, 0, 0, 0, 0, 0, missing])
        labels = F.pad(labels, [0, missing], value=-1)
        batches = zip(images.split(batch_size), labels.split(batch_size), strict=True)
        with torch.no_grad():
            for batch, batch_labels in batches:
                if self.first:
                    self.schedule.eval(batch)
                else:
                    logits = self.schedule.eval(target=batch_labels.clamp(min=0))
                    hits += (logits.argmax(dim=1) == batch_labels).sum()
        return hits


def main() -> None:
    """Read the data, train and test, and print a line for each epoch as the lessons do."""
    kind, dataset, data_dir, *numbers = sys.argv[1:]
    device = numbers.pop() if len(numbers) == 3 else "cpu"
    batch_size, epochs = map(int, numbers)
    rank = 0
    world_size = 1
    if kind != "single_gpu":
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        world_size = torch.distributed.get_world_size()
    data = [tensor.to(device) for tensor in read(dataset, data_dir)]
    images, labels, test_images, test_labels = data
    torch.manual_seed(0)
    sizes = [784, 64, 64, 64]
    layers = [nn.Flatten()]
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    if kind == "transformer":
        sys.path.append(str(Path(__file__).resolve().parents[1]))
        from common.models import Transformer

        torch.manual_seed(0)
        model = Transformer()
    pipeline = Pipeline(model) if kind == "pipeline" else None
    model = parallelize(kind, model.to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, fused=True)

    trained = len(labels) // batch_size * batch_size
    tested = len(test_labels)
    data_parallel = kind in ("ddp", "fsdp", "transformer")
    if data_parallel:
        batch_size //= world_size
        test_images = test_images[rank::world_size]
        test_labels = test_labels[rank::world_size]
    for epoch in range(epochs):
        start = time.perf_counter()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        order = order[:trained].to(device)
        if data_parallel:
            order = order[rank::world_size]
        arguments = (optimizer, images, labels, order, batch_size)
        totals = pipeline.train_epoch(*arguments) if pipeline else train_epoch(model, *arguments)
        if data_parallel or pipeline:
            torch.distributed.all_reduce(totals)
        loss_sum, hits = totals.tolist()
        seconds = time.perf_counter() - start
        if pipeline:
            test_hits = pipeline.count_hits(test_images, test_labels, batch_size)
        else:
            test_hits = count_hits(model, test_images, test_labels)
        if data_parallel or pipeline:
            torch.distributed.all_reduce(test_hits)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{epochs}  loss {loss_sum / trained:.4f}"
                f"  train {hits / trained:.2%}  test {test_hits.item() / tested:.2%}"
                f"  {seconds:.2f} s  {trained / seconds:,.0f} images/s",
                flush=True,
            )
    if world_size > 1:
        del model, pipeline  # DDP refers to the group
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
