"""What each of three ranks holds before and after each collective."""

from pathlib import Path

from matplotlib.axes import Axes

from figures.style import COLOURS, GREY, add_legend, arrow, box, new_figure, save

RANKS = 3
AFTER = 4.6  # where the second grid begins


def draw(counts: dict, path: Path) -> None:
    """Draw the numbers of all ranks in two grids for each collective."""
    figure, panels = new_figure("Before and after each collective", 4, 2, 7.6)
    for (name, count), axes in zip(counts.items(), panels.flat, strict=True):
        axes.set_xlim(-1.6, AFTER + RANKS + 0.1)
        axes.set_ylim(-0.1, RANKS + 0.1)
        axes.set_aspect("equal")
        axes.axis("off")
        axes.set_title(name, weight="bold", loc="left", x=0.17)
        owners = {  # of each number, its rank
            number: rank for rank, row in enumerate(count["before"]) for number in row
        }
        after = {number for row in count["after"] for number in row}
        sums = not after <= owners.keys()
        for rank, row in enumerate(count["before"]):
            axes.text(-0.2, RANKS - rank - 0.5, f"rank {rank}", ha="right", va="center")
            for column, number in enumerate(row):
                sent = sums or number in after
                _draw_cell(axes, (column, rank), COLOURS[rank] if sent else "none", number)
        middle = RANKS / 2
        arrow(axes, (RANKS + 0.3, middle), (AFTER - 0.3, middle), linewidth=2)
        for rank, row in enumerate(count["after"]):
            first = rank if len(row) == 1 else 0  # chunk r stands where it stood before
            for column, number in enumerate(row, start=first):
                colour = COLOURS[owners[number]] if number in owners else GREY
                _draw_cell(axes, (AFTER + column, rank), colour, number)
    names = {f"of rank {rank}": COLOURS[rank] for rank in range(RANKS)}
    add_legend(figure, names | {"sum over the ranks": GREY})
    save(figure, path)


def _draw_cell(axes: Axes, place: tuple, colour: str, number: int) -> None:
    """Draw a number of a rank. The first rank is on top."""
    column, rank = place
    box(axes, (column, RANKS - 1 - rank), (1, 1), colour, number, fontsize=11)
