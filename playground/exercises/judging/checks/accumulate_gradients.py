"""How accumulate_gradients is checked."""

from contextlib import nullcontext

import torch
from judging.single import gradients_of, seeded
from judging.traffic import sent_bytes, uncounted
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """A model with a tied and a frozen parameter, a buffer and two dtypes.

    It notes how large the micro-batches are, how many of them are empty, and how many wait for
    their backward() at a time.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.in_float64 = nn.Linear(5, 5).double()
        self.output = nn.Linear(5, 7)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor([2.0]))
        self.count_from_zero()

    def count_from_zero(self):
        self.sizes = []
        self.waiting = 0
        self.most_waiting = 0

    def forward(self, images):
        """Return the logits. An image is one whole number here."""
        self.sizes.append(len(images))
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        hidden = self.in_float64(self.frozen(self.embedding(images)).double()).float()
        hidden.register_hook(self.note_backward)
        return self.output(hidden.tanh() * self.scale)

    def note_backward(self, gradient):
        self.waiting -= 1


CASES = {
    "8 images in 4 micro-batches": {"images": 8, "count": 4},
    "7 images in 3 micro-batches": {"images": 7, "count": 3},
    "6 images in 4 micro-batches": {"images": 6, "count": 4},
    "3 images in 5 micro-batches": {"images": 3, "count": 5},
}
RUNG_1 = "for micro-batches of the same size"
RUNG_2 = "any number of images, and messages in one backward() only."
CALLS = (1, 2)
LARGEST = "images in the largest micro-batch"
EMPTY = "empty micro-batches"
IN_MEMORY = "micro-batches in memory at a time"
HINTS = """
Each backward() adds to parameter.grad. Which number must each micro-batch's loss be multiplied by,
so that these sums are the gradient of the mean? And which backward() has to send?

images.tensor_split(count) splits into parts of almost the same size. `with model.no_sync():` keeps
DDP from sending, if both forward() and backward() are inside.

count = at most one micro-batch for each image
for each micro-batch:
    inside no_sync(), unless it is the last one:
        loss = F.cross_entropy of the micro-batch
        (loss * its fraction of the images).backward()
"""


def batch_of(rank, call, images):
    generator = torch.Generator().manual_seed(10 * call + rank)
    numbers = torch.randint(7, (2, images), generator=generator)
    return numbers[0], numbers[1]


def run(accumulate_gradients, rank, world_size, images, count):
    model = seeded(Model)
    with uncounted():
        ddp = DistributedDataParallel(model)
        for _ in range(2):  # DDP sends more in its first steps, because it changes its buckets
            F.cross_entropy(ddp(torch.arange(7)), torch.arange(7)).backward()
    model.count_from_zero()
    result = {}
    for call in CALLS:
        ddp.zero_grad()
        accumulate_gradients(ddp, *batch_of(rank, call, images), count)
        result |= gradients_of(model, f"call {call}: ")
    # Smaller micro-batches are right, too.
    result[LARGEST] = max([*model.sizes, largest(images, count)])
    result[EMPTY] = model.sizes.count(0)
    result[IN_MEMORY] = model.most_waiting
    return result


def largest(images, count):
    return -(-images // count)


def expected(rank, world_size, images, count):
    result = {}
    for call in CALLS:
        model = seeded(Model)
        for each in range(world_size):
            inputs, labels = batch_of(each, call, images)
            (F.cross_entropy(model(inputs), labels) / world_size).backward()
        result |= gradients_of(model, f"call {call}: ")
    return {**result, LARGEST: largest(images, count), EMPTY: 0, IN_MEMORY: 1}


def limits(rank, world_size, images, count):
    model = seeded(Model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.nbytes for parameter in trained)
    buffers = sum(buffer.nbytes for buffer in model.buffers())  # DDP sends them in forward()
    nbytes = sent_bytes("all_reduce", gradients, world_size) + buffers
    messages = 1 + len({parameter.dtype for parameter in trained})  # one of them has the buffers
    return {"bytes": len(CALLS) * nbytes, "messages": len(CALLS) * messages}


def accumulate_gradients(model, images, labels, count):
    """Why: weighted losses add up to the mean of the batch, and only the last backward() sends."""
    count = min(count, len(labels))  # so no micro-batch is empty
    micro_batches = zip(images.tensor_split(count), labels.tensor_split(count), strict=True)
    for number, (micro_images, micro_labels) in enumerate(micro_batches, start=1):
        # DDP decides in forward() whether backward() averages the gradients.
        context = model.no_sync() if number < count else nullcontext()
        with context:
            loss = F.cross_entropy(model(micro_images), micro_labels)
            fraction = len(micro_labels) / len(labels)
            (loss * fraction).backward()


MANY = f"{EMPTY}: "
SEND = "bytes;|messages;"
WORDS = {
    "CRASH.*mark.*ready": "Each forward() of DDP needs its backward() before the next forward().",
    SEND: "DDP sends in each backward() whose forward() was outside of no_sync().",
    MANY: "There are fewer images than `count`, so split them into fewer micro-batches.",
    f"{IN_MEMORY}: ": "Call backward() for each micro-batch, before the next one's forward(). This "
    "frees what forward() has kept.",
}
CONTEXT = "model.no_sync() if number < count else nullcontext()"
FRACTION = "len(micro_labels) / len(labels)"
MISTAKES = {
    "It is 4 times what is expected": ("(loss * fraction)", "loss"),
    "7 images in 3 micro-batches": (FRACTION, "1 / count"),
    "WRONG with 1 rank, 8 images": ("        with ", "        model.zero_grad()\n        with "),
    "The mean over the ranks is": (CONTEXT, "model.no_sync()"),
    WORDS[SEND]: (CONTEXT, "nullcontext()"),
    WORDS[MANY]: ("min(count, len(labels))", "count"),
}
