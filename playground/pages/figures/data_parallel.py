"""How two ranks divide a batch and average a gradient, in a step of manual_data_parallel.py."""

import argparse
from functools import partial
from itertools import islice
from pathlib import Path

import manual_data_parallel
import torch
import torch.distributed as dist

from common.models import MLP
from figures.counting import forward_and_backward, of_all_ranks
from figures.style import GREY, ORANGE, PALE_ORANGE, SKY, arrow, box, new_figure, save

RANKS = 2
GLOBAL_BATCH = 8
DIGIT = 4  # w is the bias of its output


def count() -> dict[str, list]:
    """Run a step with a global batch of eight digits, by functions of the lesson.

    Returns:
        For each rank: "images" (the numbers of its images in the data set), and of one parameter w
        "drawn" (its first value), "sent" (after send_weights()), "own gradient", "gradient" (after
        average_gradients()) and "updated" (after Adam's step), rounded to four digits.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    flags = argparse.Namespace(dataset="digits", data_dir="", seed=0, batch_size=GLOBAL_BATCH)
    flags.double = False
    flags.device = "cpu"
    loader, _ = manual_data_parallel.loaders(flags, rank, world_size)
    loader.sampler.set_epoch(0)
    counts = {"images": list(islice(loader.sampler, GLOBAL_BATCH // world_size))}
    torch.manual_seed(rank)
    model = MLP()
    parameter = list(model.parameters())[-1]  # a bias of the last layer for each digit
    counts["drawn"] = parameter[DIGIT].item()
    manual_data_parallel.send_weights(model)
    counts["sent"] = parameter[DIGIT].item()
    images, labels = next(iter(loader))
    forward_and_backward(model, images, labels)
    counts["own gradient"] = parameter.grad[DIGIT].item()
    manual_data_parallel.average_gradients(model)
    counts["gradient"] = parameter.grad[DIGIT].item()
    torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6).step()
    counts["updated"] = parameter[DIGIT].item()
    everything = {}
    for name, value in counts.items():
        everything[name] = of_all_ranks(round(value, 4) if name != "images" else value)
    return everything


def draw(counts: dict, path: Path) -> None:
    """Draw from top to bottom how two ranks divide a batch, and average a gradient."""
    title = "Two ranks have different images and take the same step"
    figure, [[axes]] = new_figure(title, 1, 1, 6)
    colours = (SKY, PALE_ORANGE)
    parts = counts["images"]
    ranks = len(parts)
    left = (0.0, 6.0)  # of each rank's column, which is four images wide
    width = len(parts[0])

    down = partial(arrow, axes, shrinkA=2, shrinkB=2)
    whole = left[-1] + width
    first = (whole - ranks * width) / 2  # the global batch stands in the middle
    axes.text(whole / 2, 10.2, "the global batch, in shuffled order", ha="center")
    for rank, images in enumerate(parts):
        column = left[rank]
        middle = column + width / 2
        for number, image in enumerate(images):
            place = first + number * ranks + rank
            box(axes, (place, 9), (1, 1), colours[rank], str(image))
            box(axes, (column + number, 6.6), (1, 1), colours[rank], str(image))
            down((place + 0.5, 8.95), (column + number + 0.5, 7.65))
        axes.text(column - 0.2, 7.1, f"rank {rank}", ha="right", va="center", weight="bold")
        down((middle, 6.55), (middle, 5.85))
        box(axes, (column, 4.8), (width, 1), GREY, f"same model: w = {counts['sent'][rank]:.4f}")
        down((middle, 4.75), (middle, 4.05))
        gradient = f"its gradient of w: {counts['own gradient'][rank]:.4f}"
        box(axes, (column, 3), (width, 1), "none", gradient)
        down((middle, 2.95), (middle, 2.25))
        down((middle, 1.15), (middle, 0.45))
        updated = f"the same step: w = {counts['updated'][rank]:.4f}"
        box(axes, (column, -0.6), (width, 1), GREY, updated)
    mean = f"all_reduce, and divide by {ranks}: {counts['gradient'][0]:.4f}"
    box(axes, (0, 1.2), (whole, 1), ORANGE, mean)
    axes.set_xlim(-1.6, whole + 0.2)
    axes.set_ylim(-0.8, 10.9)
    axes.axis("off")
    save(figure, path)
