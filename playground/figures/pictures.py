"""The pictures that explain the ideas of this course.

They are drawn from counts. counts.py runs functions of the lessons, and counts bytes, messages and
orders, or notes times. The counts are kept beside the pictures, in pictures.json.

    python playground/figures/pictures.py                   # count and draw all pictures
    python playground/figures/pictures.py ring overlap      # only these two
    python playground/figures/pictures.py ring --keep       # draw from the counts in pictures.json

Each function that draws takes the counts of its picture and the path of a PNG.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

PLAYGROUND = Path(__file__).resolve().parents[1]
sys.path.append(str(PLAYGROUND))  # find figures/ from any working directory
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Polygon, Rectangle

from figures.attention import draw_context, draw_split
from figures.counts import count
from figures.experts import draw_experts
from figures.replicas import draw_data_parallel
from figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    SKY,
    VERMILLION,
    add_legend,
    new_figure,
    save,
)
from figures.timeline import Span, bubble

FIGURES = PLAYGROUND / "figures"
COUNTS = FIGURES / "pictures.json"
PALE = "#CFE6F5"  # a lighter SKY
PALE_ORANGE = "#FBE3AE"
PALE_PINK = "#F0D9E6"
PALE_GREEN = "#A6DECF"


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
    ink = "white" if colour in (BLUE, GREEN) else INK
    look = {"ha": "center", "va": "center", "color": ink, "fontsize": fontsize}
    axes.text(x + width / 2, y + height / 2, text, **look)


def draw_holds(counts: dict, path: Path) -> None:
    """Draw a bar for each way: what the rank that holds most holds."""
    colours = {"parameters": BLUE, "gradients": ORANGE, "Adam's averages": GREEN}
    colours |= {"activations": PINK, "buffers": "white"}
    names = {"HSDP": "HSDP, 2 x 2", "FSDP": "FSDP (ZeRO 3)", "tensor": "tensor parallel"}
    figure, [[axes]] = new_figure(1, 1, 4.8)
    for place, ranks in enumerate(counts.values()):
        held = max(ranks, key=lambda each: sum(each.values()))
        end = 0.0
        for kind, colour in colours.items():
            width = held[kind] / 1e6
            hatch = "////" if kind == "buffers" else None
            # The first bar is long enough for the names.
            text = kind if place == 0 and width > 0 else ""
            look = {"hatch": hatch, "fontsize": 11}
            box(axes, (end, -place - 0.35), (width, 0.7), colour, text, **look)
            end += width
        axes.text(end + 1, -place, f"{end:.0f}", va="center", weight="bold")
    texts = [names.get(way, way) for way in counts]
    axes.set_yticks([-place for place in range(len(counts))], texts, fontsize=12)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0.5 - len(counts), 0.5)
    axes.set_xlim(0, 112)
    axes.set_xlabel("MB")
    axes.set_title("MB that one of four ranks holds in a step", weight="bold", fontsize=14)
    patch = Patch(facecolor="white", edgecolor=INK, hatch="////")
    patch.set_label("buffers, at their largest:\nmessages, gathered layers")
    axes.legend(handles=[patch], loc="lower right", fontsize=11)
    save(figure, path)


def draw_ring(counts: dict, path: Path) -> None:
    """Draw the chunks of each rank after each step, and arrows for those that travel."""
    ranks = len(counts["sent"])
    steps = len(counts["sent"][0])
    between_ranks = ranks + 0.5
    between_steps = 2.0
    right_end = ranks * between_ranks - 0.5
    colours = {1: "white", 2: PALE, 3: SKY, 4: BLUE}  # by how many chunks have been added
    figure, [[axes]] = new_figure(1, 1, 7.6)
    inside = Rectangle((-0.25, -steps * between_steps), right_end + 0.5, 100, visible=False)
    axes.add_patch(inside)
    for rank in range(ranks):
        left = rank * between_ranks
        axes.text(left + ranks / 2, 1.4, f"rank {rank}", ha="center", weight="bold")
        for step, chunks in enumerate(counts["held"][rank]):
            y = -step * between_steps
            for number, added in enumerate(chunks):
                text = "".join("abcdefgh"[int(each)] for each in added)
                if len(added) == ranks:
                    text = "sum"
                box(axes, (left + number, y), (1, 1), colours[len(added)], text)
        for step, number in enumerate(counts["sent"][rank]):
            y = -step * between_steps
            box(axes, (left + number, y), (1, 1), "none", edgecolor=ORANGE, linewidth=3, zorder=3)
            # The right neighbour of the last rank is rank 0, so its arrow begins again on the left.
            starts = [left + number + 0.5]
            if rank == ranks - 1:
                starts.append(starts[0] - ranks * between_ranks)
            for start in starts:
                arrow = axes.annotate(
                    "",
                    (start + between_ranks, y - between_steps + 1),
                    (start, y),
                    arrowprops={"arrowstyle": "-|>", "color": ORANGE, "linewidth": 2},
                    annotation_clip=False,
                )
                arrow.arrow_patch.set_clip_path(inside)
    half = steps // 2
    for step in range(steps + 1):
        phase = "at the\nstart"
        if step > 0:
            name = "reduce-\nscatter" if step <= half else "all-\ngather"
            phase = f"{name} {(step - 1) % half + 1}"
        axes.text(-0.4, 0.5 - step * between_steps, phase, ha="right", va="center")
    axes.set_xlim(-2.5, right_end + 0.25)
    axes.set_ylim(-steps * between_steps - 0.1, 2)
    axes.axis("off")
    save(figure, path)


def draw_overlap(counts: dict, path: Path) -> None:
    """Draw when rank 0 computes, and when its messages travel, in a step with DDP."""
    colours = {"forward": SKY, "backward": BLUE, "optimizer": GREEN, "messages": ORANGE}
    figure, panels = new_figure(len(counts), 1, 5.2, sharex=True)
    for panel, (buckets, parts) in zip(panels[:, 0], counts.items(), strict=True):
        for kind in ("forward", "backward", "optimizer"):
            start, end = parts[kind]
            box(panel, (start, 1.1), (end - start, 0.8), colours[kind])
        # Messages may travel at the same time, so each one has a row of its own.
        count_of_messages = len(parts["messages"])
        height = 0.8 / count_of_messages
        for number, (start, end) in enumerate(parts["messages"]):
            corner = (start, 0.9 - (number + 1) * height)
            box(panel, corner, (end - start, height), colours["messages"])
        computed = parts["backward"][1]
        waited = parts["optimizer"][0]
        look = {"arrowstyle": "<->", "color": INK, "shrinkA": 0, "shrinkB": 0}
        panel.annotate("", (computed, 1.5), (waited, 1.5), arrowprops=look)
        middle = (computed + waited) / 2
        panel.text(middle, 1.95, f"waits {waited - computed:.0f} ms", ha="center", va="bottom")
        panel.set_yticks([1.5, 0.5], ["computing", "messages"])
        panel.set_ylim(0, 2.3)
        panel.set_title(f"{buckets}, messages: {count_of_messages}", loc="left")
    longest = max(parts["optimizer"][1] for parts in counts.values())
    panels[-1, 0].set_xlim(0, 1.02 * longest)
    panels[-1, 0].set_xlabel("ms")
    add_legend(figure, colours)
    save(figure, path)


def draw_fsdp(counts: dict, path: Path) -> None:
    """Draw a column for each time at which a layer computes, and in it what is whole then."""
    sizes = counts["layers"]
    layers = len(sizes)
    figure, panels = new_figure(2, 1, 8)
    titles = {"freed": "FSDP", "kept": "FSDP with --keep_weights"}
    for panel, (name, title) in zip(panels[:, 0], titles.items(), strict=True):
        most = 0
        ticks = []
        for place, moment in enumerate(counts[name]):
            x = place if moment["direction"] == "forward" else place + 0.6
            ticks.append(x)
            for layer in range(1, layers + 1):
                colour = BLUE if layer in moment["whole"] else "white"
                box(panel, (x - 0.5, -layer - 0.5), (1, 1), colour, edgecolor="0.8")
            colour = ORANGE if moment["buffer"] else "white"
            box(panel, (x - 0.5, -layers - 1.7), (1, 1), colour, edgecolor="0.8")
            together = moment["buffer"] + sum(sizes[layer - 1] for layer in moment["whole"])
            most = max(most, together)
            amount = f"{together / 1e6:.1f}"
            panel.text(x, -layers - 2.4, amount, ha="center", va="center", fontsize=11)
            number = moment["computes"]
            panel.text(x, -layers - 3.4, number, ha="center", va="center", fontsize=11)
        panel.set_xticks([])
        rows = [f"layer {layer}" for layer in range(1, layers + 1)] + [
            "buffer",
            "together, MB",
            "computing: layer",
        ]
        places = [-layer for layer in range(1, layers + 1)] + [-layers - 1.2]
        places += [-layers - 2.4, -layers - 3.4]
        panel.set_yticks(places, rows)
        panel.tick_params(length=0)
        panel.set_xlim(-0.6, ticks[-1] + 0.6)
        panel.set_ylim(-layers - 5.1, -0.4)
        panel.spines[:].set_visible(False)
        model = f"model: {sum(sizes) / 1e6:.1f} MB"
        text = f"{title}: at most {most / 1e6:.1f} MB ({model})"
        panel.set_title(text, loc="left", weight="bold")
        for half, text in ((0, "forward pass"), (layers + 0.6, "backward pass")):
            x = half + (layers - 1) / 2
            panel.text(x, -layers - 4.4, text, ha="center", va="center")
    add_legend(figure, {"layer is whole": BLUE, "buffer in which a layer arrives": ORANGE})
    save(figure, path)


def draw_tensor(counts: dict, path: Path) -> None:
    """Draw the matrices and activations of a pair of layers on two ranks, and its all_reduces."""
    figure, [[axes]] = new_figure(1, 1, 5)
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
        box(axes, (left[name], y - height / 2), (widths[name], height), "white", edgecolor="0.6")
        box(axes, (left[name] + corner[0], y - height / 2 + corner[1]), size, BLUE, text)

    for rank, (y, shapes) in enumerate(zip(lanes, counts["ranks"], strict=True)):
        axes.text(left["x"], y + height / 2 + 0.6, f"rank {rank}", weight="bold", va="bottom")
        size = {}
        for name, shape in (shapes | {"x": counts["x"], "y": counts["y"]}).items():
            size[name] = f"{shape[0]} x {shape[1]}"
        tensor("x", y, "x", size["x"])
        tensor("A", y, "", size["A"], "white")
        half("A", y, f"A{rank}", (rank * widths["A"] / 2, 0), (widths["A"] / 2, height))
        tensor("h", y, f"h{rank}", size["x A"])
        tensor("B", y, "", size["B"], "white")
        half("B", y, f"B{rank}", (0, (1 - rank) * height / 2), (widths["B"], height / 2))
        tensor("y", y, f"y{rank}", size["y"])
        tensor("sum", y, "y", size["y"])
        names = list(widths)
        for first, second in pairwise(names):
            ends = (left[first] + widths[first] + 0.3, left[second] - 0.3)
            for offset, colour, points in ((2, INK, ends), (-2, VERMILLION, ends[::-1])):
                look = {"arrowstyle": "-|>", "color": colour, "linewidth": 2}
                look |= {"shrinkA": 0, "shrinkB": 0}
                start = (points[0], y + offset)
                axes.annotate("", (points[1], y + offset), start, arrowprops=look)
    tall = lanes[0] - lanes[1] + height
    for name, what in (("backward", "gradients\nof x"), ("forward", "y0 + y1")):
        number, size = counts[name]
        text = f"{name}:\n{number} all_reduce\n{what}\n{size:,}\nbytes"
        corner = (left[name], lanes[1] - height / 2)
        box(axes, corner, (widths[name], tall), ORANGE, text, fontsize=11)
    middle = (left["A"] + left["forward"]) / 2 - gap / 2
    for y, colour, text in (
        (1.3, INK, "forward \u2192  h = ReLU(x A),  y = h B"),
        (-1.3, VERMILLION, "\u2190 backward: their gradients"),
    ):
        axes.text(middle, y, text, ha="center", va="center", color=colour, weight="bold")
    axes.set_title("The last two layers of the MLP on two ranks", weight="bold", fontsize=14)
    axes.set_xlim(-0.5, end - gap + 0.5)
    axes.set_ylim(lanes[1] - height / 2 - 3, lanes[0] + height / 2 + 3)
    axes.axis("off")
    save(figure, path)


def stages_on_a_rank(orders: list[str]) -> int:
    """Return how many stages each rank has in the orders of count_schedules()."""
    stages = set()
    for order in orders:
        stages |= set(re.findall(r"(\d+)F", order))
    return len(stages) // len(orders)


def logical_time(orders: list[str], stages_per_rank: int) -> list[Span]:
    """Return when each rank computes what, if messages took no time.

    The forward pass of all layers of a rank takes 1, and their backward pass 2. If a backward pass
    is split in two, each part takes 1.

    Args:
        orders: of each rank, as count_schedules() returns them.
        stages_per_rank: how many stages the layers of a rank are.

    Returns:
        Spans. Their kind is "F0" for the forward pass of a rank's first stage, "I1" for the
        gradient of the input of its second stage, and so on.
    """
    ranks = len(orders)
    last_stage = ranks * stages_per_rank - 1
    lengths = {"F": 1, "B": 2, "I": 1, "W": 1}
    waiting = [order.split() for order in orders]
    free = [0.0] * ranks  # when each rank has done what it has begun
    ends = {}  # of what the next stage, or the stage before, needs
    spans = []
    while any(waiting):
        count_before = len(spans)
        for rank, words in enumerate(waiting):
            while words:
                number, letter, micro_batch = re.match(r"(\d+)(\w)(\d+)", words[0]).groups()
                stage = int(number)
                needed = None
                if letter == "F" and stage > 0:
                    needed = ("forward", stage - 1, micro_batch)
                if letter in "BI" and stage < last_stage:
                    needed = ("backward", stage + 1, micro_batch)
                if needed and needed not in ends:
                    break
                start = max(free[rank], ends.get(needed, 0.0))
                end = start + lengths[letter] / stages_per_rank
                free[rank] = end
                if letter == "F":
                    ends["forward", stage, micro_batch] = end
                if letter in "BI":
                    ends["backward", stage, micro_batch] = end
                spans.append(Span(rank, f"{letter}{stage // ranks}", int(micro_batch), start, end))
                words.pop(0)
        assert len(spans) > count_before, "all ranks wait for each other"
    return spans


def draw_schedules(counts: dict, path: Path) -> None:
    """Draw the counted order of each schedule on logical time."""
    colours = {  # for the first stage of a rank, and for its second one
        "F": (BLUE, SKY),
        "B": (ORANGE, PALE_ORANGE),
        "I": (PINK, PALE_PINK),
        "W": (GREEN, PALE_GREEN),
    }
    figure, panels = new_figure(len(counts), 1, 8, sharex=True)
    for panel, (schedule, orders) in zip(panels[:, 0], counts.items(), strict=True):
        ranks = len(orders)
        spans = logical_time(orders, stages_on_a_rank(orders))
        for span in spans:
            letter, stage = span.kind
            width = span.end - span.start
            corner = (span.start, ranks - 1 - span.rank)
            colour = colours[letter][int(stage)]
            box(panel, corner, (width, 0.85), colour, span.micro_batch, fontsize=10)
        ticks = [rank + 0.4 for rank in range(ranks)]
        panel.set_yticks(ticks, [f"rank {rank}" for rank in range(ranks)[::-1]])
        panel.set_ylim(-0.1, ranks)
        waiting = bubble(spans, ranks)
        panel.set_title(f"{schedule}: {waiting:.0%} of the time is waiting (bubble)", loc="left")
        panel.margins(x=0.01)
    panels[-1, 0].set_xlabel("logical time: forward of a rank's layers takes 1, backward 2")
    names = {"forward": BLUE, "backward: both gradients": ORANGE}
    names |= {"gradients of activations": PINK, "gradients of parameters": GREEN}
    names |= {"pale: 2nd stage": "white"}
    add_legend(figure, names, columns=3)
    save(figure, path)


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


def draw_mesh(counts: list, path: Path) -> None:
    """Draw the ranks of each mesh in a grid, and arrows as wide as the bytes that they send."""
    titles = {"tp": "tensor parallel across,\nFSDP down", "hsdp": "HSDP: FSDP across,\ncopies down"}
    travels = {
        "tp": ("activations and their gradients", PINK),
        "dp": ("parameters and their gradients", BLUE),
        "shard": ("parameters and their gradients", BLUE),
        "replicate": ("gradients only", ORANGE),
    }
    figure, panels = new_figure(1, len(counts), 4.8)
    most = 0
    for picture in counts:
        most = max([most, *(max(sent) for sent in picture["sent"].values())])
    for panel, picture in zip(panels[0], counts, strict=True):
        down, across = picture["sent"]
        for row, ranks in enumerate(picture["mesh"]):
            for column, rank in enumerate(ranks):
                box(panel, (1.6 * column, -1.6 * row), (0.7, 0.7), GREY, f"rank\n{rank}")
        for row, (rank, _) in enumerate(picture["mesh"]):
            y = 0.35 - 1.6 * row
            width = 0.55 * picture["sent"][across][rank] / most
            double_arrow(panel, (0.72, y), (1.58, y), width, travels[across][1])
            amount = f"{picture['sent'][across][rank] / 1000:.0f} kB"
            above = row == 0
            place = y + 0.4 if above else y - 0.4
            panel.text(1.15, place, amount, ha="center", va="bottom" if above else "top")
        amounts = set()
        for column, rank in enumerate(picture["mesh"][0]):
            x = 0.35 + 1.6 * column
            width = 0.55 * picture["sent"][down][rank] / most
            double_arrow(panel, (x, -0.88), (x, -0.02), width, travels[down][1])
            amount = f"{picture['sent'][down][rank] / 1000:.0f} kB"
            amounts.add(amount)
        panel.text(1.15, -0.45, "\n".join(sorted(amounts)), ha="center", va="center")
        heading = f"{titles[picture['kind']]}\n{picture['images']:,} images"
        panel.text(1.15, 1.3, heading, ha="center", va="bottom")
        panel.set_xlim(-0.1, 2.4)
        panel.set_ylim(-1.95, 2.1)
        panel.set_aspect("equal")
        panel.axis("off")
    figure.suptitle("kB sent by each rank in a step", fontsize=14, weight="bold")
    colours = dict(travels.values())
    patches = [Patch(facecolor=colours[name], edgecolor=INK, label=name) for name in colours]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=3,
        handlelength=1.2,
        columnspacing=1.2,
        fontsize=11,
    )
    save(figure, path)


def draw_axes(counts: dict, path: Path) -> None:
    """Draw eight ranks in two grids, and along each axis an arrow as wide as the bytes sent."""
    colours = {"dp": BLUE, "cp": ORANGE, "tp": PINK}
    travels = {
        "dp": "dp: gradients",
        "cp": "cp: keys, values, gradients",
        "tp": "tp: terms of activations",
    }
    figure, panels = new_figure(1, 1, 4.6)
    panel = panels[0, 0]
    most = max(max(sent) for sent in counts.values())
    width = {name: 0.55 * max(sent) / most for name, sent in counts.items()}
    amount = {name: f"{max(sent) / 1000:,.0f} kB" for name, sent in counts.items()}
    for replica in range(2):
        left = 4.3 * replica
        box(panel, (left - 0.3, -2.0), (3.0, 3.0), "white", linestyle="--")
        panel.text(left + 1.2, 1.1, f"dp {replica}: 64 images", ha="center", va="bottom")
        for row in range(2):
            for column in range(2):
                rank = 4 * replica + 2 * row + column
                box(panel, (left + 1.7 * column, -1.7 * row), (0.7, 0.7), GREY, f"rank\n{rank}")
            y = 0.35 - 1.7 * row
            double_arrow(panel, (left + 0.72, y), (left + 1.68, y), width["tp"], colours["tp"])
        for column in range(2):
            x = left + 0.35 + 1.7 * column
            double_arrow(panel, (x, -0.98), (x, -0.02), width["cp"], colours["cp"])
        panel.text(left + 1.2, 0.75, amount["tp"], ha="center", va="center")
        panel.text(left + 1.2, -0.5, amount["cp"], ha="center", va="center")
    double_arrow(panel, (2.72, -0.5), (3.98, -0.5), width["dp"], colours["dp"])
    panel.text(3.35, -0.1, amount["dp"], ha="center", va="center")
    panel.set_xlim(-0.4, 7.1)
    panel.set_ylim(-2.1, 1.5)
    panel.set_aspect("equal")
    panel.axis("off")
    figure.suptitle("kB sent by each rank in a step", fontsize=14, weight="bold")
    patches = [
        Patch(facecolor=colours[name], edgecolor=INK, label=travels[name]) for name in colours
    ]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=3,
        handlelength=1.2,
        columnspacing=1.2,
        fontsize=11,
    )
    save(figure, path)


def draw_waits(counts: dict, path: Path) -> None:
    """Draw in which call each of two ranks is, in four exchanges."""
    titles = {
        "rank 0 is late": "rank 0 sends, rank 1 receives; rank 0 starts late",
        "rank 1 is late": "rank 0 sends, rank 1 receives; rank 1 starts late",
        "blocking": "both send and receive, and then compute",
        "nonblocking": "both compute between isend, irecv and wait()",
    }
    colours = {"asleep": GREY, "computing": BLUE, "send": ORANGE, "recv": ORANGE, "wait": ORANGE}
    texts = {"asleep": "asleep", "computing": "computes"}
    texts |= {"send": "waits in send", "recv": "waits in recv", "wait": "waits in wait"}
    figure, panels = new_figure(4, 1, 6.4, sharex=True)
    for panel, (name, title) in zip(panels[:, 0], titles.items(), strict=True):
        for rank, kind, start, end in counts[name]:
            text = texts[kind] if end - start > 0.15 else ""  # seconds
            box(panel, (start, 0.6 - rank), (end - start, 0.8), colours[kind], text)
        panel.set_yticks([1, 0], ["rank 0", "rank 1"])
        panel.set_ylim(-0.5, 1.5)
        panel.set_title(title, loc="left")
    last_end = max(end for _, _, _, end in chain(*counts.values()))
    panels[-1, 0].set_xlim(0, 1.02 * last_end)
    panels[-1, 0].set_xlabel("seconds")
    save(figure, path)


DRAW: dict[str, Callable] = {
    "holds": draw_holds,
    "waits": draw_waits,
    "ring": draw_ring,
    "data_parallel": draw_data_parallel,
    "overlap": draw_overlap,
    "fsdp": draw_fsdp,
    "schedules": draw_schedules,
    "tensor": draw_tensor,
    "mesh": draw_mesh,
    "split": draw_split,
    "context": draw_context,
    "experts": draw_experts,
    "axes": draw_axes,
}


def main() -> None:
    """Count what the pictures show, keep the counts, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(DRAW)
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=f"default: {', '.join(names)}")
    parser.add_argument("--keep", action="store_true", help="draw from pictures.json, do not count")
    args = parser.parse_args()
    wrong = [name for name in args.pictures if name not in names]
    if wrong:
        parser.error(f"there is no picture {wrong[0]}: choose from {', '.join(names)}")
    wanted = args.pictures or names
    counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if not args.keep:
        counts |= count(wanted)
        lines = [f'"{name}": {json.dumps(counts[name])}' for name in names if name in counts]
        COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name in wanted:
        DRAW[name](counts[name], FIGURES / f"{name}.png")
        print(f"wrote {FIGURES / name}.png")


if __name__ == "__main__":
    main()
