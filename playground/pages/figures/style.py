"""The style of all figures of this course. They are drawn without a display."""

import io
import re
from pathlib import Path

import matplotlib
import numpy

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle
from scour.scour import parse_args, scourString

# Colour-blind people can tell these colours apart. They are those of Okabe and Ito, and can be seen
# on a white page and on a dark one.
BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
SKY = "#56B4E9"
PINK = "#CC79A7"
VERMILLION = "#D55E00"
RED = "#D3222A"  # as watch.py shows who waits
COLOURS = [BLUE, ORANGE, GREEN, PINK]  # of four ranks
PALE = "#BBDDF2"  # a lighter SKY
PALE_VERMILLION = "#F0B48C"
PALE_PINK = "#EAC4D9"
PALE_GREEN = "#8FD3BE"
GREY = "#B4B4B4"
BLACK = "#1A1A1A"  # on a colour
INK = "#555555"  # on the page: in an SVG it is lighter where the page is dark
FONTS = "'DejaVu Sans', 'Verdana', sans-serif"  # the letters of both have the same width
THEME = f"svg {{ color: #555; font-family: {FONTS} }} "
THEME += "@media (prefers-color-scheme: dark) { svg { color: #bbb } } "
SMALLER = {  # what becomes of parts of an SVG, so that it is a fraction as large
    r"(\.\d)\d+(?=[^<>]*>)": r"\1",  # of places, which are inside a tag
    r"<!--.*?-->\s*": "",
    rf" font-family: {FONTS};": "",
    r' transform="rotate\(-0 .*?\)"': "",
    r'\s*\n(?=[LQCz"])': " ",
    r'<g id="\w+">\s*(<(?:path|text)[^<]*(?:/>|</text>))\s*</g>': r"\1",
    INK.lower(): "currentColor",
    r"\*\{": THEME + "*{",
}
SAME_LOOK = r'" (style="[^"]*"/>)\s*<path d="([^"]*" \1)'  # of two paths, which become one
IN_ONE_LINE = [*("--indent=none", "--no-line-breaks", "--enable-id-stripping"), "--remove-metadata"]
WIDE = 7.2  # inches: 691 pixels of a page

STYLE = {
    "font.size": 12,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "axes.titlesize": 12,
    "xtick.labelsize": 11,
    "ytick.labelsize": 12,
    "figure.titlesize": 14,
    "figure.titleweight": "bold",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#80808055",
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "",  # the same names in each run
}
plt.rcParams.update(STYLE)
for name in ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"):
    plt.rcParams[name] = INK


def new_figure(
    title: str, rows: int, columns: int, height: float, **options
) -> tuple[Figure, numpy.ndarray]:
    """Return a figure with panels in rows and columns, and an array of its panels.

    Args:
        title: what the figure shows.
        rows, columns: of the array.
        height: inches. The figure is WIDE inches wide.
        options: for pyplot.subplots.
    """
    figure, panels = plt.subplots(rows, columns, figsize=(WIDE, height), squeeze=False, **options)
    figure.suptitle(title)
    return figure, panels


def add_legend(figure: Figure, colours: dict[str, str], columns: int | None = None) -> None:
    """Write the names of some colours below a figure, in so many columns or in one row."""
    patches = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    look = {"ncols": columns or len(patches), "handlelength": 1.2, "columnspacing": 1.2}
    figure.legend(handles=patches, loc="outside lower center", **look)


def save(figure: Figure, path: Path) -> None:
    """Write a figure as an SVG. Drawn again from the same numbers, it has the same bytes."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    small = text.getvalue()
    for pattern, new in SMALLER.items():
        small = re.sub(pattern, new, small)
    while re.search(SAME_LOOK, small):
        small = re.sub(SAME_LOOK, r"\2", small)
    path.write_text(scourString(small, parse_args(IN_ONE_LINE)))
    plt.close(figure)


def ink_on(colour: str) -> str:
    """Return the colour of a text that can be read on a colour."""
    return {BLUE: "white", RED: "white", "none": INK}.get(colour, BLACK)


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
    edge = INK if colour == "none" else BLACK
    look = {"facecolor": colour, "edgecolor": edge, "linewidth": 0.8}
    options = look | {"joinstyle": "round", "clip_on": False} | options
    axes.add_patch(Rectangle(corner, *size, **options))
    if text != "":
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
    axes.add_patch(Polygon(points, facecolor=colour, edgecolor=BLACK, linewidth=0.8))
