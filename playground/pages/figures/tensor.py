"""The matrices and messages of two layers that tensor_parallel.py has split over two ranks."""

from itertools import pairwise
from pathlib import Path

from figures.style import BLUE, INK, ORANGE, PINK, VERMILLION, arrow, box, new_figure, save


def draw(counts: dict, path: Path) -> None:
    """Draw the matrices and activations of a pair of layers on two ranks, and its all_reduces."""
    title = "Two layers on two ranks: one all_reduce in each direction"
    figure, [[axes]] = new_figure(title, 1, 1, 5)
    widths = {"x": 8, "backward": 14, "A": 9, "h": 9, "B": 9, "y": 9, "forward": 14, "sum": 8}
    gap = 3
    left = {}
    end = 0.0
    for name, width in widths.items():
        left[name] = end
        end += width + gap
    lanes = (10, -10)  # the middles of both ranks' rows
    height = 9

    def tensor(name, y, text, shape, colour=PINK):
        box(axes, (left[name], y - height / 2), (widths[name], height), colour, text)
        middle = left[name] + widths[name] / 2
        axes.text(middle, y - height / 2 - 0.5, shape, ha="center", va="top", fontsize=11)

    def half(name, y, text, corner, size):
        box(axes, (left[name], y - height / 2), (widths[name], height), "none")
        box(axes, (left[name] + corner[0], y - height / 2 + corner[1]), size, BLUE, text)

    for rank, (y, shapes) in enumerate(zip(lanes, counts["ranks"], strict=True)):
        axes.text(left["x"], y + height / 2 + 0.6, f"rank {rank}", weight="bold", va="bottom")
        size = {}
        for name, shape in (shapes | {"x": counts["x"], "y": counts["y"]}).items():
            size[name] = f"{shape[0]} x {shape[1]}"
        tensor("x", y, "x", size["x"])
        tensor("A", y, "", size["A"], "none")
        half("A", y, f"A{rank}", (rank * widths["A"] / 2, 0), (widths["A"] / 2, height))
        tensor("h", y, f"h{rank}", size["x A"])
        tensor("B", y, "", size["B"], "none")
        half("B", y, f"B{rank}", (0, (1 - rank) * height / 2), (widths["B"], height / 2))
        tensor("y", y, f"y{rank}", size["y"])
        tensor("sum", y, "y", size["y"])
        names = list(widths)
        for first, second in pairwise(names):
            ends = (left[first] + widths[first] + 0.3, left[second] - 0.3)
            for offset, colour, points in ((2, INK, ends), (-2, VERMILLION, ends[::-1])):
                start, end_of_arrow = points
                place = y + offset
                arrow(axes, (start, place), (end_of_arrow, place), colour, linewidth=2)
    tall = lanes[0] - lanes[1] + height
    for name, what in (("backward", "gradients\nof x"), ("forward", "y0 + y1")):
        number, size = counts[name]
        text = f"only in\n{name}:\n{number} all_reduce\n{what}\n{size:,}\nbytes"
        corner = (left[name], lanes[1] - height / 2)
        box(axes, corner, (widths[name], tall), ORANGE, text, fontsize=10)
    middle = (left["A"] + left["forward"]) / 2 - gap / 2
    for y, colour, text in (
        (1.3, INK, "forward \u2192  h = ReLU(x A),  y = h B"),
        (-1.3, VERMILLION, "\u2190 backward: their gradients"),
    ):
        axes.text(middle, y, text, ha="center", va="center", color=colour, weight="bold")
    axes.set_xlim(-0.5, end - gap + 0.5)
    axes.set_ylim(lanes[1] - height / 2 - 3, lanes[0] + height / 2 + 3)
    axes.axis("off")
    save(figure, path)
