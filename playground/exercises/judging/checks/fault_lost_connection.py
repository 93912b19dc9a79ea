"""How fault_lost_connection is checked."""

import torch
import torch.distributed as dist
from judging.single import named, step
from torch.nn import functional as F

NAME = "train"
JOIN = False
FAULT = "CRASH with 2 ranks ... all_reduce ... has left the group"
CASES = {"limit 1": {"limit": 1.0}, "limit 0.5": {"limit": 0.5}}
STEPS = "the number of steps"
LEFT = "the group, which this rank"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
STARTS = True
HINTS = """
After how many steps does each rank leave the group, and which number decides this?

dist.all_reduce can also add up the losses. Then every rank knows the loss of the global batch, and
all of them take the same decision.

after each step:
    mean_loss = the mean of the ranks' losses, the same on all ranks
    if mean_loss < limit: break
"""


def make_model():
    torch.manual_seed(4)
    return torch.nn.Linear(2, 1, bias=False)


def part(rank):
    """Return the images and the labels of a rank. The losses of the ranks differ a lot."""
    generator = torch.Generator().manual_seed(rank)
    images = (1 + 0.3 * rank) * torch.randn(6, 2, generator=generator)
    return images, images @ torch.tensor([[1.0], [2.0]])


def run(train, rank, world_size, limit):
    """Call the learner's function on this rank, which joins a process group by itself."""
    model = make_model()
    images, labels = part(rank)
    steps = train(model, images, labels, limit)
    left = "has left" if not dist.is_initialized() else "has not left"
    return {STEPS: steps, **named(model), LEFT: left}


def expected(rank, world_size, limit):
    model = make_model()
    parts = [part(each) for each in range(world_size)]
    steps = 0
    while steps < 20:
        steps += 1
        losses = torch.stack([F.mse_loss(model(images), labels) for images, labels in parts])
        step(model, losses.mean())
        if losses.mean() < limit:
            break
    return {STEPS: steps, **named(model), LEFT: "has left"}


REPAIR = (
    "        if loss < limit:",
    "        mean_loss = loss.detach()\n"
    "        dist.all_reduce(mean_loss)\n"
    "        mean_loss /= dist.get_world_size()\n"
    "        if mean_loss < limit:",
)
WHY = "all ranks have the same mean loss, so all leave the group at the same step."


NOT_LEFT = f"{LEFT}: has not"
WORDS = {NOT_LEFT: "A rank must leave the group before its program ends."}
MISTAKES = {
    "the number of steps: 8": ("        mean_loss /= dist.get_world_size()\n", ""),
    WORDS[NOT_LEFT]: ("    dist.destroy_process_group()\n", ""),
}
