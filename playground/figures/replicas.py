"""The picture of data parallelism, drawn from counts of a step of manual_data_parallel.py.

count_data_parallel() is called on each rank of a process group on CPUs, and returns the same on all
ranks, as in counts.py. draw_data_parallel() takes these counts and the path of a PNG, as in
pictures.py.
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

PLAYGROUND = Path(__file__).resolve().parents[1]
sys.path.append(str(PLAYGROUND))  # find the lessons from any working directory
sys.path.append(str(PLAYGROUND.parent))  # find common/
import manual_data_parallel
from matplotlib.patches import Rectangle

from common.models import MLP
from figures.ranks import of_all_ranks
from figures.style import GREY, INK, ORANGE, SKY, new_figure, save

GLOBAL_BATCH = 8
DIGIT = 4  # w is the bias of its output
PALE_ORANGE = "#FBE3AE"


def count_data_parallel() -> dict[str, list]:
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
    F.cross_entropy(model(images), labels).backward()
    counts["own gradient"] = parameter.grad[DIGIT].item()
    manual_data_parallel.average_gradients(model)
    counts["gradient"] = parameter.grad[DIGIT].item()
    torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6).step()
    counts["updated"] = parameter[DIGIT].item()
    everything = {}
    for name, value in counts.items():
        everything[name] = of_all_ranks(round(value, 4) if name != "images" else value)
    return everything


def draw_data_parallel(counts: dict, path: Path) -> None:
    """Draw from top to bottom how two ranks divide a batch, and average a gradient."""
    figure, [[axes]] = new_figure(1, 1, 6.6)
    colours = (SKY, PALE_ORANGE)
    parts = counts["images"]
    ranks = len(parts)
    left = (0.0, 6.0)  # of each rank's column, which is four images wide
    width = len(parts[0])

    def box(corner, size, colour, text):
        axes.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor=INK, linewidth=0.8))
        middle = (corner[0] + size[0] / 2, corner[1] + size[1] / 2)
        axes.text(*middle, text, ha="center", va="center", fontsize=12)

    def arrow(start, end):
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK})

    whole = left[-1] + width
    first = (whole - ranks * width) / 2  # the global batch stands in the middle
    axes.text(whole / 2, 10.3, "the global batch, in shuffled order", ha="center", weight="bold")
    for rank, images in enumerate(parts):
        column = left[rank]
        middle = column + width / 2
        for number, image in enumerate(images):
            place = first + number * ranks + rank
            box((place, 9), (1, 1), colours[rank], str(image))
            box((column + number, 6.6), (1, 1), colours[rank], str(image))
            arrow((place + 0.5, 8.95), (column + number + 0.5, 7.65))
        axes.text(column - 0.2, 7.1, f"rank {rank}", ha="right", va="center", weight="bold")
        arrow((middle, 6.55), (middle, 5.85))
        box((column, 4.8), (width, 1), GREY, f"the same model: w = {counts['sent'][rank]:.4f}")
        arrow((middle, 4.75), (middle, 4.05))
        gradient = f"its gradient of w: {counts['own gradient'][rank]:.4f}"
        box((column, 3), (width, 1), "white", gradient)
        arrow((middle, 2.95), (middle, 2.25))
        arrow((middle, 1.15), (middle, 0.45))
        updated = f"the same step: w = {counts['updated'][rank]:.4f}"
        box((column, -0.6), (width, 1), GREY, updated)
    mean = f"all_reduce, and divide by {ranks}: {counts['gradient'][0]:.4f}"
    box((0, 1.2), (whole, 1), ORANGE, mean)
    axes.set_xlim(-1.6, whole + 0.2)
    axes.set_ylim(-0.8, 10.9)
    axes.axis("off")
    save(figure, path)
