"""How fault_wrong_gradient is checked."""

import torch
from judging.single import named, step, together
from torch.nn import functional as F

NAME = "train"
FAULT = "WRONG with 2 ranks, 1 step"
CASES = {
    "1 step": {"lengths": (2, 6, 1, 3, 5), "steps": 1},
    "3 steps with odd numbers of images": {"lengths": (5, 1, 7, 3, 9), "steps": 3},
    "no images on some ranks": {"lengths": (4, 0, 3, 0, 1), "steps": 2},
}
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
STARTS = True
HINTS = """
How much does one image of a rank with few images count in the mean over the ranks, and how much an
image of a rank with many?

F.cross_entropy(logits, labels, reduction="sum") adds up the losses of the images, even if there are
none. dist.all_reduce can also add up how many images the ranks have. NCCL cannot send CPU tensors,
so make this number a tensor on the device of the images.

all_images = the number of images of all ranks
loss = the sum over this rank's images
the gradient = the sum of the ranks' gradients / all_images
"""


def make_model():
    torch.manual_seed(1)
    return torch.nn.Linear(3, 2)


def part(rank, lengths):
    generator = torch.Generator().manual_seed(rank)
    images = torch.randn(lengths[rank], 3, generator=generator) * (rank + 1)
    return images, torch.full((lengths[rank],), rank % 2)


def run(train, rank, world_size, lengths, steps):
    model = make_model()
    train(model, *part(rank, lengths), steps)
    return named(model)


def expected(rank, world_size, lengths, steps):
    images, labels = together([part(each, lengths) for each in range(world_size)])
    model = make_model()
    for _ in range(steps):
        step(model, F.cross_entropy(model(images), labels))
    return named(model)


REPAIR = (
    "    for _ in",
    "    # NCCL cannot send CPU tensors.\n"
    "    all_images = torch.tensor(len(labels), device=labels.device)\n"
    "    dist.all_reduce(all_images)\n"
    "    for _ in",
    "model(images), labels)",
    'model(images), labels, reduction="sum")',
    "dist.get_world_size()",
    "all_images",
)
WHY = "the ranks add up sums and divide by all images, so each image counts the same."
SUM = ', reduction="sum"'
DIVIDE = "/= all_images"
NO_GRADIENT = "A parameter has no gradient until backward() has been called: its grad is None."
WORDS = {"CRASH.*NoneType": NO_GRADIENT}
MISTAKES = {
    NO_GRADIENT: ("        loss.backward", "        len(labels) and loss.backward"),
    "WRONG with 1 rank, 1 step": (DIVIDE, "/= 1"),
    "expected, divided by 2": (DIVIDE, "/= all_images * dist.get_world_size()"),
    "The ranks should have the same numbers": (
        *(SUM, "", DIVIDE, "/= 1"),
        *("            dist.all_reduce(parameter.grad)\n", ""),
    ),
}
