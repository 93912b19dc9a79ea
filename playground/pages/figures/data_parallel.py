"""How two ranks divide a batch and average a gradient, in a step of manual_data_parallel.py."""

from functools import partial
from pathlib import Path

from figures.style import GREY, ORANGE, PALE_GREEN, SKY, arrow, box, new_figure, save


def draw(counts: dict, path: Path) -> None:
    """Draw from top to bottom how two ranks divide a batch, and average a gradient."""
    title = "Two ranks have different images and take the same step"
    figure, [[axes]] = new_figure(title, 1, 1, 6)
    colours = (SKY, PALE_GREEN)
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
        sent = f"same weight: w = {counts['sent'][rank]:.4f}"
        box(axes, (column, 4.8), (width, 1), GREY, sent)
        down((middle, 4.75), (middle, 4.05))
        gradient = f"its gradient of w: {counts['own gradient'][rank]:.4f}"
        box(axes, (column, 3), (width, 1), "none", gradient)
        down((middle, 2.95), (middle, 2.25))
        down((middle, 1.15), (middle, 0.45))
        updated = f"Adam's step: w = {counts['updated'][rank]:.4f}"
        box(axes, (column, -0.6), (width, 1), GREY, updated)
    mean = f"all_reduce, and divide by {ranks}: {counts['gradient'][0]:.4f}"
    box(axes, (0, 1.2), (whole, 1), ORANGE, mean)
    axes.set_xlim(-1.6, whole + 0.2)
    axes.set_ylim(-0.8, 10.9)
    axes.axis("off")
    save(figure, path)
