"""How the tokens of a batch travel to their experts and back, in expert_parallel.py."""

from pathlib import Path

import numpy
from matplotlib.axes import Axes

from figures.style import BLUE, GREY, ORANGE, add_legend, box, new_figure, save

STAYS = GREY
TRAVELS = ORANGE


def ribbon(axes: Axes, start: tuple, end: tuple, height: float, colour: str) -> None:
    """Draw a band from one place to another. Both are its lower corners."""
    along = numpy.linspace(0, 1, 60)
    x = start[0] + (end[0] - start[0]) * along
    lower = start[1] + (end[1] - start[1]) * (3 * along**2 - 2 * along**3)
    axes.fill_between(x, lower, lower + height, color=colour, linewidth=0, alpha=0.75)


def draw(counts: dict, path: Path) -> None:
    """Draw bands from the tokens of each rank to the experts, and back, as wide as their number."""
    loads = counts["loads"]
    ranks = len(loads)
    here = len(loads[0]) // ranks  # experts on each rank
    arriving = [sum(column) for column in zip(*loads, strict=True)]
    gap = max(arriving) / 6
    left = {"tokens": 0.0, "experts": 4.3, "outputs": 10.0}
    width = {"tokens": 0.5, "experts": 1.9, "outputs": 0.5}
    title = f"One expert gets {max(arriving):,} tokens, and another {min(arriving):,}"
    figure, [[axes]] = new_figure(title, 1, 1, 6.2)
    at_rank = {}  # for each rank and expert, the lower end of the band at the tokens
    at_expert = {}
    top = 0.0
    for rank, height in enumerate(lane_heights(loads, here, gap)):
        box(axes, (-2.1, top - height), (14, height), "#80808022", linewidth=0, zorder=0)
        middle = top - height / 2
        axes.text(-1.85, middle, f"rank {rank}", weight="bold", va="center", rotation=90)
        y = middle + sum(loads[rank]) / 2
        for expert, number in enumerate(loads[rank]):
            y -= number
            at_rank[rank, expert] = y
        own = range(rank * here, (rank + 1) * here)
        y = middle + (sum(arriving[expert] for expert in own) + gap * (here - 2)) / 2
        for expert in own:
            for source in range(ranks):
                y -= loads[source][expert]
                at_expert[source, expert] = y
            box(axes, (left["experts"], y), (width["experts"], arriving[expert]), BLUE)
            x = left["experts"] + width["experts"] / 2
            above = y + arriving[expert] + gap / 10
            axes.text(x, above, f"expert {expert}: {arriving[expert]:,}", ha="center", va="bottom")
            y -= gap
        top -= height + gap / 2
    for (rank, expert), y in at_rank.items():
        number = loads[rank][expert]
        colour = STAYS if expert // here == rank else TRAVELS
        for name in ("tokens", "outputs"):
            box(axes, (left[name], y), (width[name], number), colour)
        if number > gap / 2:  # otherwise there is no room for the number
            axes.text(-0.15, y + number / 2, number, ha="right", va="center")
        place = at_expert[rank, expert]
        there = (left["tokens"] + width["tokens"], y), (left["experts"], place)
        back = (left["experts"] + width["experts"], place), (left["outputs"], y)
        for start, end in (there, back):
            ribbon(axes, start, end, number, colour)
    for x, text in (
        (0.0, "number of tokens,\nby expert"),
        (2.4, "counts, then\nall_to_all"),
        (5.25, "experts\ncompute"),
        (8.1, "all_to_all\nback"),
        (10.4, "outputs,\nby expert"),
    ):
        axes.text(x, gap / 4, text, ha="center", va="bottom", fontsize=11)
    axes.set_xlim(-2.2, 12)
    axes.set_ylim(top + gap / 2, gap * 2.2)
    axes.axis("off")
    add_legend(figure, {"stays on its rank": STAYS, "travels to the other rank": TRAVELS})
    save(figure, path)


def lane_heights(loads: list[list[int]], here: int, gap: float) -> list[float]:
    """Return the height of each rank's lane: that of its tokens, or of its experts if larger."""
    arriving = [sum(column) for column in zip(*loads, strict=True)]
    heights = []
    for rank, load in enumerate(loads):
        own = arriving[rank * here : (rank + 1) * here]
        heights.append(max(sum(load), sum(own) + gap * (here - 1)) + 2 * gap)
    return heights
