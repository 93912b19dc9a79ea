"""Lessons without anything around their training.

A bare program uses the same PyTorch classes as its lesson. It trains on the same shuffled batches,
counts the same losses and hits, and prints the same numbers. It has no DataLoader, no flags, no
progress bar and no checkpoint.

    python tests/programs/bare.py mlp mnist data 128 3
    torchrun --standalone --nproc-per-node 2 tests/programs/bare.py mlp mnist data 128 3

The arguments are the model (mlp, or language, on the data set "text"), the data set, its folder,
the global batch and the epochs. torchrun's ranks train with DDP.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
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
    layers = [nn.Flatten()]
    for inputs in (784, 64, 64):
        layers += [nn.Linear(inputs, 64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def main():
    """Read the data, train and test, and print a line for each epoch as the lessons do."""
    kind, dataset, data_dir, batch_size, epochs = sys.argv[1:]
    batch_size, epochs = int(batch_size), int(epochs)
    rank, world_size = 0, int(os.environ.get("WORLD_SIZE", 1))
    model = make_model(kind)
    if world_size > 1:
        dist.init_process_group("gloo")
        rank, model = dist.get_rank(), DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6, fused=True)
    images, labels, *tests = read(dataset, data_dir)
    test_images, test_labels = (part[rank::world_size] for part in tests)
    trained = len(labels) - len(labels) % batch_size
    each = labels[0].numel()  # an image has one label, and a row of the text one for each token
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch - 1))
        totals = torch.zeros(3, dtype=torch.float64)  # losses, hits, hits of the test
        for places in order[:trained][rank::world_size].split(batch_size // world_size):
            batch, right = images.index_select(0, places), labels.index_select(0, places)
            optimizer.zero_grad()
            logits = model(batch)
            loss = F.cross_entropy(logits, right)
            loss.backward()
            optimizer.step()
            totals[0] += loss.detach() * right.numel()
            totals[1] += (logits.argmax(dim=1) == right).sum()
        seconds = time.perf_counter() - start
        with torch.no_grad():
            totals[2] += (model(test_images).argmax(dim=1) == test_labels).sum()
        if world_size > 1:
            dist.all_reduce(totals)
        loss, hits = (totals[:2] / trained / each).tolist()
        if rank == 0:
            numbers = f"loss {loss:.4f}  train {hits:.2%}"
            numbers += f"  test {totals[2].item() / tests[1].numel():.2%}"
            unit = "tokens" if kind == "language" else "images"
            speed = f"{seconds:.2f} s  {trained * each / seconds:,.0f} {unit}/s"
            print(f"epoch {epoch}/{epochs}  {numbers}  {speed}", flush=True)
    if world_size > 1:
        del model  # DDP refers to the group
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # find common/
    main()
