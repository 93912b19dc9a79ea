"""The style of all figures of this course. They are drawn without a display."""

from pathlib import Path

import matplotlib
import numpy

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle
from PIL import Image

# Colour-blind people can tell these colours apart. They are those of Okabe and Ito.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
SKY = "#56B4E9"
PINK = "#CC79A7"
VERMILLION = "#D55E00"
COLOURS = [BLUE, ORANGE, GREEN, PINK]  # of four ranks
PALE = "#CFE6F5"  # a lighter SKY
PALE_ORANGE = "#FBE3AE"
PALE_PINK = "#F0D9E6"
PALE_GREEN = "#A6DECF"
INK = "0.1"  # a black that is a little lighter
GREY = "0.85"
WIDE = 8  # inches; with wider figures all letters are smaller
PIXELS = 1000  # the width of each figure

plt.rcParams["font.size"] = 12
plt.rcParams["axes.titlesize"] = 12
plt.rcParams["axes.labelsize"] = 12
plt.rcParams["xtick.labelsize"] = 11
plt.rcParams["ytick.labelsize"] = 11
plt.rcParams["legend.fontsize"] = 12
plt.rcParams["legend.frameon"] = False
plt.rcParams["axes.spines.top"] = False
plt.rcParams["axes.spines.right"] = False
plt.rcParams["text.color"] = INK
plt.rcParams["figure.constrained_layout.use"] = True


def new_figure(rows: int, columns: int, height: float, **options) -> tuple[Figure, numpy.ndarray]:
    """Return a figure with panels in rows and columns, and an array of its panels.

    Args:
        rows, columns: of the array.
        height: inches. The figure is WIDE inches wide, or as `figsize` says.
        options: for pyplot.subplots.
    """
    options = {"figsize": (WIDE, height), "squeeze": False} | options
    return plt.subplots(rows, columns, **options)


def add_legend(
    figure: Figure, colours: dict[str, str], columns: int | None = None, **options
) -> None:
    """Write the names of some colours above a figure, in so many columns or in one row."""
    patches = []
    for name, colour in colours.items():
        patches.append(Patch(facecolor=colour, edgecolor=INK, linewidth=0.6, label=name))
    options = {"loc": "outside upper center", "ncols": columns or len(patches)} | options
    figure.legend(handles=patches, **options)


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure. Drawn again from the same numbers, a PNG has the same bytes."""
    width, _ = figure.get_size_inches()
    figure.savefig(path, dpi=PIXELS / width)
    plt.close(figure)
    if Path(path).suffix == ".png":
        with Image.open(path) as image:
            few_colours = image.convert("RGB").quantize(colors=128)
        few_colours.save(path, optimize=True)  # a third of the size, and without a version in it


def ink_on(colour: str) -> str:
    """Return the colour of a text that can be read on a colour."""
    return "white" if colour in (BLUE, GREEN) else INK


def box(
    axes: Axes,
    corner: tuple,
    size: tuple,
    colour: str,
    text: str = "",
    fontsize: float = 12,
    **options,
) -> None:
    """Draw a rectangle with a text in its middle. The corner is the lower left one."""
    options = {"facecolor": colour, "edgecolor": INK, "linewidth": 0.8} | options
    axes.add_patch(Rectangle(corner, *size, **options))
    x, y = corner
    width, height = size
    look = {"ha": "center", "va": "center", "color": ink_on(colour), "fontsize": fontsize}
    axes.text(x + width / 2, y + height / 2, text, **look)


def arrow(axes: Axes, start: tuple, end: tuple, colour: str = INK, **options) -> None:
    """Draw an arrow, with options of matplotlib's FancyArrowPatch."""
    look = {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0} | options
    axes.annotate("", end, start, arrowprops=look, zorder=4)


def double_arrow(axes: Axes, start: tuple, end: tuple, width: float, colour: str) -> None:
    """Draw an arrow with two heads, to the right or upwards, with a given width of its line."""
    head = 0.12
    half = width / 2
    wide = half + 0.06  # of a head
    across = start[1] == end[1]
    first, last = (start[0], end[0]) if across else (start[1], end[1])
    outline = [(first, 0), (first + head, wide), (first + head, half), (last - head, half)]
    outline += [(last - head, wide), (last, 0)]
    outline += [(along, -away) for along, away in outline[-2:0:-1]]
    if across:
        points = [(along, start[1] + away) for along, away in outline]
    else:
        points = [(start[0] + away, along) for along, away in outline]
    axes.add_patch(Polygon(points, facecolor=colour, edgecolor=INK, linewidth=0.8))
