"""How fault_same_order is checked."""

import random

import torch
from judging.single import of_all_ranks, step
from torch.nn import functional as F
from torch.utils.data import Dataset

NAME = "train"
FAULT = "WRONG with 1 rank, 13 images ... all epochs have the same order"
CASES = {"13 images": {"length": 13, "epochs": 3}, "16 images": {"length": 16, "epochs": 7}}
RIGHT = "each epoch has an order of its own"
BATCH = 2  # images of a rank in a step
HINTS = """
Which object chooses the order of an epoch, and how does it know the epoch?

DistributedSampler draws its order with the seed `seed + epoch`. It cannot know the epoch by itself.
sampler.set_epoch(number) tells it.

for epoch in range(epochs):
    tell the sampler the number of this epoch
    for images, labels in loader:
        ...
"""


class Recorded(Dataset):
    """Images that note in which order they are read."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(length)
        self.images = torch.randn(length, 3, generator=generator)
        self.labels = torch.arange(length) % 2
        self.read = []

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(f"there is no image {index}: the last one is {len(self) - 1}")
        self.read.append(int(index))
        return self.images[index], self.labels[index]


def make_model():
    torch.manual_seed(1)
    return torch.nn.Linear(3, 2, bias=False)


def run(train, rank, world_size, length, epochs):
    dataset = Recorded(length)
    model = make_model()
    # The random numbers of the ranks differ, as those of programs that set no seed.
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    train(model, dataset, epochs)
    orders = of_all_ranks(dataset.read)
    words = words_on(orders, length, epochs)
    result = {"the order of the images": words, "the trained model": "was not checked"}
    if words == RIGHT:
        result["the trained model"] = words_on_model(model, orders, length, epochs)
    return result


def expected(rank, world_size, length, epochs):
    return {"the order of the images": RIGHT, "the trained model": "as of a single process"}


def words_on(orders, length, epochs):
    """Return in words what is wrong with the orders in which the ranks have read; or RIGHT."""
    part = length // len(orders)  # images of a rank in an epoch
    for rank, order in enumerate(orders):
        if len(order) != epochs * part:
            return f"rank {rank} has read {len(order)} images, not {epochs * part}"
    by_epoch = []
    for epoch in range(epochs):
        start = epoch * part
        parts = [order[start : start + part] for order in orders]
        by_epoch.append(parts)
        read = sum(parts, [])
        twice = len(read) - len(set(read))
        if twice:
            return f"in epoch {epoch + 1}, {twice} of the {length} images are read more than once"
    same = [parts for parts in by_epoch[1:] if parts == by_epoch[0]]
    if len(same) == epochs - 1:
        return "all epochs have the same order"
    for epoch in range(1, epochs):
        if by_epoch[epoch] in by_epoch[:epoch]:
            before = by_epoch.index(by_epoch[epoch])
            return f"epoch {epoch + 1} has the order of epoch {before + 1}, but not all are equal"
    images = [set(parts[0]) for parts in by_epoch]
    if len(orders) > 1 and all(each == images[0] for each in images):
        return "each rank has the same images in all epochs, in a new order"
    return RIGHT


def words_on_model(model, orders, length, epochs):
    """Train a single process with the images that the ranks have read, and compare the models."""
    dataset = Recorded(length)
    single = make_model()
    part = length // len(orders)
    for epoch in range(epochs):
        end = (epoch + 1) * part
        for start in range(epoch * part, end, BATCH):
            batch = sum((order[start : min(start + BATCH, end)] for order in orders), [])
            step(single, F.cross_entropy(single(dataset.images[batch]), dataset.labels[batch]))
    for parameter, other in zip(model.parameters(), single.parameters(), strict=True):
        if not torch.allclose(parameter, other, rtol=1e-4, atol=1e-5):
            return "differs from that of a single process"
    return "as of a single process"


REPAIR = (
    "for _ in range(epochs):",
    "for epoch in range(epochs):\n        sampler.set_epoch(epoch)",
)
WHY = "the sampler's order depends on the epoch, and set_epoch tells the sampler the epoch."
WORDS = {
    "has read": "Every rank reads its part of the images. An epoch has len(dataset) // n images of "
    "it."
}
SAMPLER = "DistributedSampler(dataset, seed=0, drop_last=True)"
OWN = "dist.get_rank() * (n := len(dataset) // dist.get_world_size())"
SET = "sampler.set_epoch(epoch)"
MISTAKES = {
    "the trained model: differs from": ("dist.all_reduce(parameter.grad)", "pass"),
    WORDS["has read"]: (SAMPLER, "torch.utils.data.RandomSampler(dataset)", SET, "pass"),
    "images are read more than once": ("seed=0", "seed=dist.get_rank()"),
    "epoch 2 has the order of epoch 1": ("range(epochs):", "[0, *range(epochs - 1)]:"),
    "each rank has the same images in all epochs": (
        *(SAMPLER, f"torch.utils.data.SubsetRandomSampler(range({OWN}, {OWN} + n))"),
        *(SET, "pass"),
    ),
}
