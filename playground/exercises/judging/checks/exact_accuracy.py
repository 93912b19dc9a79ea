"""How exact_accuracy is checked."""

import torch
import torch.distributed as dist
from judging.attempt import Rung
from judging.traffic import sent_bytes
from torch import nn
from torch.nn import functional as F

CASES = {
    "as many images on each rank": {"empty": None, "dtype": torch.float32, "equal": True},
    "batches of different sizes": {"empty": None, "dtype": torch.float32},
    "no images on the last rank": {"empty": -1, "dtype": torch.float64},
    "no images on rank 0": {"empty": 0, "dtype": torch.float32},
}
RUNG_1 = Rung(
    cases=("as many images on each rank",),
    words="for as many images on each rank",
    then="any number of images, or none, and one message.",
)
SIZES = [[2, 2, 1], [3], [2, 2], [1], [2, 4]]  # the images in the batches of each rank
CLASSES = 3
RESULT = "the mean loss and the accuracy"
IMITATED = True
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
        """Return the logits."""
        if torch.is_grad_enabled():
            self.autograd = "on"
        return self.last(self.dropout(self.norm(self.first(images)).relu()))


def batches_of(rank, world_size, empty, dtype, equal=False):
    """Return the batches of a rank, a list of pairs (images, labels).

    Args:
        rank: the rank.
        world_size: the number of ranks.
        empty: the rank that has no batches; -1 is the last one. None: all have some.
        dtype: the dtype of the images.
        equal: whether all ranks have the same number of images, in batches of the same size.
    """
    if world_size > 1 and empty is not None and rank == empty % world_size:
        return []
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for size in [3, 3] if equal else SIZES[rank]:
        images = torch.randn(size, 4, generator=generator, dtype=dtype)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        batches.append((images, labels))
    return batches


def model_of(dtype):
    """Return the model."""
    torch.manual_seed(0)
    return Model().to(dtype)


def run(exact_accuracy, dtype, **case):
    """Call the learner's function on this rank."""
    model = model_of(dtype)
    batches = batches_of(dist.get_rank(), dist.get_world_size(), dtype=dtype, **case)
    returned = exact_accuracy(model, batches)
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        returned = torch.tensor([float(each) for each in returned], dtype=torch.float64)
    return {RESULT: returned, "autograd": model.autograd, **model.state_dict()}


def expected(rank, world_size, dtype, **case):
    """Return what run() should return."""
    batches = []
    for each in range(world_size):
        batches += batches_of(each, world_size, dtype=dtype, **case)
    images = torch.cat([each for each, _ in batches])
    labels = torch.cat([each for _, each in batches])
    with torch.no_grad():
        logits = model_of(dtype).eval()(images)
    hits = (logits.argmax(dim=1) == labels).double().mean()
    means = torch.stack([F.cross_entropy(logits, labels).double(), hits])
    return {RESULT: means, "autograd": "off", **model_of(dtype).state_dict()}


def limits(rank, world_size, **case):
    """Return how much a rank may send."""
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


WORDS = {
    "CRASH.*ZeroDivisionError": "A rank without images has nothing to divide. Add up over the "
    "ranks first."
}


def explain(trial):
    """Put typical mistakes into words."""
    if trial.verdict == "HANG":
        return explain_hang(trial)
    if trial.verdict == "COSTLY":
        mine = trial.messages[trial.rank]
        if all(message.numel > 1 for message in mine):
            return "Is this a message for each batch? Other ranks may have more batches, or fewer."
        return "Put the sums into one tensor, and add it up over the ranks once."
    actual, right = trial.of_rank()
    if actual["autograd"] == "on":
        return "Autograd records each operation for backward(). Turn it off with torch.no_grad()."
    returned = actual[RESULT]
    if not isinstance(returned, torch.Tensor) or returned.shape != (2,):
        return "Return two numbers: the mean loss, and the accuracy."
    if not returned.isfinite().all():
        return "A rank without images has nothing to divide. Add up over the ranks first."
    for number in (0, 1):
        if torch.isclose(returned[number], right[RESULT][1 - number]):
            return "Return the mean loss first, then the accuracy."
    if not torch.equal(actual["norm.running_mean"], right["norm.running_mean"]):
        return "The buffers of batch norm have changed. Call model.eval() first."
    return None


def explain_hang(trial):
    """Put it into words if the ranks do not send the same messages."""
    size = trial.world_size
    counts = [len(messages) for messages in trial.messages]
    for rank in range(size):
        if counts[rank] == 0 and not batches_of(rank, size, **trial.case):
            return (
                f"Rank {rank} has no images, but it must call the same collectives as the others."
            )
    if len(set(counts)) > 1:
        return "The ranks have different numbers of batches. Call collectives after the last batch."
    return None


REDUCE = "    dist.all_reduce(totals)\n"
SUM = 'reduction="sum")'
LOOP = "    for images, labels in batches:\n"
MISTAKES = {
    "These are the numbers of this rank's own images.": (REDUCE, ""),
    "This is the mean over ranks, but a rank with fewer images must count less.": (
        *(REDUCE, f"    totals = totals / totals[2]\n{REDUCE}"),
    ),
    "This is the mean over batches, but a smaller batch must count less.": (
        *(SUM, 'reduction="mean")'),
        *("== labels).sum()", "== labels).float().mean()"),
        *("+= len(labels)", "+= 1"),
    ),
    "These are sums over all images. Divide them by the number of images.": (
        *("loss_sum / seen, hits / seen", "loss_sum, hits"),
    ),
    "The sums are divided by the number of ranks, not of images.": (
        *("    return ", "    seen = dist.get_world_size()\n    return "),
    ),
    "Call model.eval() first.": ("    model.eval()\n", ""),
    "Turn it off with torch.no_grad().": ("@torch.no_grad()\n", "", SUM, f"{SUM}.item()"),
    "has no images, but it must call the same collectives as the others.": (
        *(LOOP, f"    if not batches:\n        return 0.0, 0.0\n{LOOP}"),
    ),
}
