"""How exact_accuracy is checked."""

import torch
import torch.distributed as dist
from judging.single import seeded
from judging.traffic import sent_bytes
from torch import nn
from torch.nn import functional as F

CASES = {
    "as many images on each rank": {"empty": None, "dtype": torch.float32, "equal": True},
    "batches of different sizes": {"empty": None, "dtype": torch.float32},
    "no images on the last rank": {"empty": -1, "dtype": torch.float64},
    "no images on rank 0": {"empty": 0, "dtype": torch.float32},
}
RUNG_1 = "for as many images on each rank"
RUNG_2 = "any number of images, or none, and one message."
SIZES = [[2, 2, 1], [3], [2, 2], [1], [2, 4]]  # the images in the batches of each rank
CLASSES = 3
RESULT = "the mean loss and the accuracy"
HINTS = """
A mean of means counts each batch the same, although some batches have fewer images. Which three
sums over all images of all ranks give both results?

F.cross_entropy(logits, labels, reduction="sum") adds up the losses of a batch.
dist.all_reduce(totals) adds up over the ranks. Test with model.eval() and torch.no_grad().

totals = three zeros of float64, on the model's device
for images, labels in batches: add to them the losses, the recognized images and all images
all_reduce the totals, even on a rank without batches
return the first two, each divided by the third
"""


class Model(nn.Module):
    """A model with dropout and batch norm. It notes whether autograd is on."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout()
        self.last = nn.Linear(8, CLASSES)
        self.autograd = "off"

    def forward(self, images):
        if torch.is_grad_enabled():
            self.autograd = "on"
        return self.last(self.dropout(self.norm(self.first(images)).relu()))


def batches_of(rank, world_size, empty, dtype, equal=False):
    """Return the batches of a rank, a list of pairs (images, labels). The rank `empty` has none."""
    if world_size > 1 and empty is not None and rank == empty % world_size:
        return []
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for size in [3, 3] if equal else SIZES[rank]:
        images = torch.randn(size, 4, generator=generator, dtype=dtype)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        batches.append((images, labels))
    return batches


def run(exact_accuracy, rank, world_size, dtype, **case):
    model = seeded(Model).to(dtype)
    batches = batches_of(rank, world_size, dtype=dtype, **case)
    returned = exact_accuracy(model, batches)
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        returned = [float(each) for each in returned]
    return {**model.state_dict(), "autograd": model.autograd, RESULT: returned}


def expected(rank, world_size, dtype, **case):
    batches = []
    for each in range(world_size):
        batches += batches_of(each, world_size, dtype=dtype, **case)
    images = torch.cat([each for each, _ in batches])
    labels = torch.cat([each for _, each in batches])
    with torch.no_grad():
        logits = seeded(Model).to(dtype).eval()(images)
    hits = (logits.argmax(dim=1) == labels).double().mean()
    means = [F.cross_entropy(logits, labels).item(), hits.item()]
    return {**seeded(Model).to(dtype).state_dict(), "autograd": "off", RESULT: means}


def limits(rank, world_size, **case):
    return {"messages": 1, "bytes": sent_bytes("all_reduce", 3 * 8, world_size)}


@torch.no_grad()
def exact_accuracy(model, batches):
    """Why: sums over all images are exact, but a mean of means is not if batches differ."""
    model.eval()
    # A rank may have no images, so the model tells the device. NCCL cannot send CPU tensors.
    device = next(model.parameters()).device
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # losses, recognized, all images
    for images, labels in batches:
        logits = model(images)
        totals[0] += F.cross_entropy(logits, labels, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == labels).sum()
        totals[2] += len(labels)
    dist.all_reduce(totals)
    loss_sum, hits, seen = totals.tolist()
    return loss_sum / seen, hits / seen


NO_IMAGES = "CRASH.*ZeroDivisionError"
WORDS = {
    NO_IMAGES: "A rank without images has nothing to divide. Add up over the ranks first.",
    "HANG, no images": "A rank without images must call the same collectives as the others.",
    "HANG, batches": "The ranks have different numbers of batches. Call collectives after the last "
    "batch.",
    "messages;": "Put the sums into one tensor, and add it up over the ranks once, after the last "
    "batch.",
    "norm.running": "The buffers of batch norm have changed. Call model.eval() first.",
    "autograd: on": "Autograd records each operation for backward(). Turn it off with "
    "torch.no_grad().",
}
REDUCE = "    dist.all_reduce(totals)\n"
SUM = 'reduction="sum")'
LOOP = "    for images, labels in batches:\n"
MISTAKES = {
    "The mean over the ranks is": (REDUCE, ""),
    "WRONG with 2 ranks, batches": (REDUCE, f"    totals = totals / totals[2]\n{REDUCE}"),
    "Call model.eval() first.": ("    model.eval()\n", ""),
    "Turn it off with torch.no_grad().": ("@torch.no_grad()\n", "", SUM, f"{SUM}.item()"),
    WORDS["HANG, no images"]: (LOOP, f"    if not batches:\n        return 0.0, 0.0\n{LOOP}"),
}
