"""Which keys and values each rank has in each step of ring attention."""

from pathlib import Path

from matplotlib.axes import Axes

from figures.style import COLOURS, VERMILLION, add_legend, arrow, box, new_figure, save


def draw(counts: dict, path: Path) -> None:
    """Draw the queries of each rank, and the chunk of keys and values that it has in each step."""
    held = counts["held"]
    ranks = len(held)
    title = "Queries stay, and the keys and values of all tokens come by"
    figure, panels = new_figure(title, 1, ranks, 3.9)
    for step, axes in enumerate(panels.flat):
        axes.set_xlim(-0.1, 3.4)
        axes.set_ylim(-0.75, ranks * 1.5 + 0.2)
        axes.set_aspect("equal")
        axes.axis("off")
        axes.set_title(f"step {step + 1}", weight="bold")
        for rank in range(ranks):
            y = 1.5 * (ranks - 1 - rank)
            if step == 0:
                axes.text(-0.25, y + 0.5, f"rank {rank}", ha="right", va="center")
            chunk = held[rank][step]
            box(axes, (0, y), (1, 1), COLOURS[rank], f"q{rank}", fontsize=11)
            box(axes, (1.5, y), (1.5, 1), COLOURS[chunk], f"k{chunk} v{chunk}", fontsize=11)
            if step < ranks - 1:
                _draw_send(axes, y)
        if step < ranks - 1:  # what leaves at the bottom enters at the top
            _draw_send(axes, 1.5 * ranks)
    names = {f"of rank {rank}": COLOURS[rank] for rank in range(ranks)}
    add_legend(figure, names)
    save(figure, path)


def _draw_send(axes: Axes, y: float) -> None:
    """Draw an arrow from the keys and values at a height to those of the next rank."""
    arrow(axes, (2.25, y), (2.25, y - 0.5), VERMILLION, linewidth=2.5)
