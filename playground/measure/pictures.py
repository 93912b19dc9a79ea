"""The pictures that explain the ideas of this course.

They are drawn from counts. counts.py runs functions of the lessons, and counts bytes, messages and
orders, or notes times. The counts are kept beside the pictures, in pictures.json.

    python playground/measure/pictures.py                   # count and draw all pictures
    python playground/measure/pictures.py ring overlap      # only these two
    python playground/measure/pictures.py ring --keep       # draw from the counts in pictures.json

Each function that draws takes the counts of its picture and the path of a PNG.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

PLAYGROUND = Path(__file__).resolve().parents[1]
sys.path.append(str(PLAYGROUND))  # find measure/ from any working directory
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Polygon, Rectangle

from measure.counts import count
from measure.figures import BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY, add_legend, new_figure, save
from measure.timeline import Span, bubble

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


def megabytes(number: float) -> str:
    """Return bytes as a text in MB."""
    return f"{number / 1e6:.0f}"


def draw_holds(counts: dict, path: Path) -> None:
    """Draw what each rank holds as blocks, and as outlines what one process holds."""
    colours = {"parameters": BLUE, "gradients": ORANGE}
    colours |= {"Adam's state": GREEN, "activations": PINK}
    whole = counts["one process"][0]
    highest = sum(whole.values())
    figure, panels = new_figure(2, 4, 6.8, sharey=True)
    for panel, (way, ranks) in zip(panels.flat, counts.items(), strict=True):
        if way == "one process":
            ranks = ranks[:1]
        for rank, held in enumerate(ranks):
            bottom = 0
            for kind, colour in colours.items():
                # Of what is sharded, rank 0 has the first part, and the last rank the last part.
                place = 0.0
                if len(ranks) > 1 and kind != "activations":
                    place = rank / (len(ranks) - 1) * (whole[kind] - held[kind])
                outline = (rank - 0.4, bottom), (0.8, whole[kind])
                box(panel, *outline, "white", edgecolor="0.7")
                box(panel, (rank - 0.4, bottom + place), (0.8, held[kind]), colour)
                bottom += whole[kind]
        totals = [sum(held.values()) for held in ranks]
        amounts = megabytes(max(totals))
        if megabytes(min(totals)) != amounts:
            amounts = f"{megabytes(min(totals))} to {amounts}"
        panel.set_title(f"{way}\n{amounts} MB")
        panel.set_xticks(range(len(ranks)))
        panel.set_xlim(-0.6, 3.6)
        panel.set_ylim(0, 1.02 * highest)
        panel.yaxis.set_major_formatter(lambda value, _: megabytes(value))
    for row in panels:
        row[0].set_ylabel("MB on a rank")
    figure.supxlabel("rank", fontsize=12)
    add_legend(figure, colours)
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
    """Draw the bytes of whole parameters while each layer computes, forward and then backward."""
    layers = len(counts["freed"]["forward"])
    names = [f"{layer + 1}" for layer in range(layers)]
    figure, [[axes]] = new_figure(1, 1, 4.8)
    places = [*range(layers), *range(layers + 1, 2 * layers + 1)]
    heights = {}
    for kind in ("freed", "kept"):
        heights[kind] = [*counts[kind]["forward"], *counts[kind]["backward"][::-1]]
    axes.bar(places, heights["kept"], 0.9, color=PALE, edgecolor=INK, linewidth=0.6)
    axes.bar(places, heights["freed"], 0.6, color=BLUE, edgecolor=INK, linewidth=0.6)
    axes.axhline(counts["model"], linestyle="--", color=INK)
    axes.text(-0.5, 1.02 * counts["model"], "all parameters of the model", va="bottom")
    axes.set_xticks(places, names + names[::-1])
    axes.set_xlabel("layer that computes: forward pass, then backward pass")
    axes.set_ylabel("whole parameters, MB")
    axes.yaxis.set_major_formatter(lambda value, _: megabytes(value))
    axes.locator_params(axis="y", nbins=5)
    axes.set_ylim(0, 1.05 * max(heights["kept"]))
    add_legend(figure, {"FSDP": BLUE, "with --keep_weights": PALE})
    save(figure, path)


def draw_tensor(counts: dict, path: Path) -> None:
    """Draw the matrices and activations of a pair of layers on two ranks, and its all_reduces."""
    images, inputs = counts["x"]
    hidden = sum(shapes["A"][1] for shapes in counts["ranks"])
    _, outputs = counts["y"]
    figure, [[axes]] = new_figure(1, 1, 4.9)
    lane = images + 50  # from the middle of one rank to that of the next
    heads = {
        "x": "input\nx",
        "A": "columns\nof A",
        "h": "h =\nReLU(x A)",
        "B": "rows\nof B",
        "term": "term of y:\nh B",
        "y": "output\ny0 + y1",
    }
    places = {"x": 0, "A": 128, "h": 226, "B": 292, "term": 390, "y": 516}

    def matrix(name, rank, whole, part, start, text):
        """Draw the outline of a whole matrix, and in it the part that a rank has.

        `whole` and `part` are shapes. The part starts at the row and the column `start`.
        """
        left = places[name]
        top = whole[0] / 2 - rank * lane
        box(axes, (left, top - whole[0]), (whole[1], whole[0]), "white", edgecolor="0.7")
        if rank == 0:
            axes.text(left + whole[1] / 2, images / 2 + 8, heads[name], ha="center", va="bottom")
        size = f"{part[0]} x {part[1]}"
        axes.text(left + whole[1] / 2, top - whole[0] - 5, size, ha="center", va="top")
        corner = (left + start[1], top - start[0] - part[0])
        colour = GREY if name in ("x", "y") else (BLUE, GREEN)[rank]
        box(axes, corner, (part[1], part[0]), colour, text)

    for rank, shapes in enumerate(counts["ranks"]):
        columns = rank * shapes["A"][1]
        rows = rank * shapes["B"][0]
        matrix("x", rank, counts["x"], counts["x"], (0, 0), "x")
        matrix("A", rank, [inputs, hidden], shapes["A"], (0, columns), f"A{rank}")
        matrix("h", rank, shapes["x A"], shapes["x A"], (0, 0), f"h{rank}")
        matrix("B", rank, [hidden, outputs], shapes["B"], (rows, 0), f"B{rank}")
        matrix("term", rank, counts["y"], counts["y"], (0, 0), f"y{rank}")
        matrix("y", rank, counts["y"], counts["y"], (0, 0), "y")
        axes.text(-8, -rank * lane, f"rank {rank}", rotation=90, ha="right", va="center")
    bottom = -lane - images / 2
    for x, direction in ((84, "backward"), (472, "forward")):
        number, size = counts[direction]
        box(axes, (x, bottom), (26, lane + images), ORANGE)
        text = f"{direction}: {number} all_reduce of {size:,} bytes"
        axes.text(x + 13, bottom + (lane + images) / 2, text, rotation=90, ha="center", va="center")
    axes.set_xlim(-22, places["y"] + outputs + 3)
    axes.set_ylim(bottom - 22, images / 2 + 45)
    axes.set_aspect("equal")
    axes.axis("off")
    save(figure, path)


def stages_on_a_rank(orders: list[str]) -> int:
    """Return how many stages each rank has in the orders of count_schedules()."""
    stages = {word.split("F")[0] for order in orders for word in order.split() if "F" in word}
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
            corner = (span.start, ranks - 1 - span.worker)
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
    "overlap": draw_overlap,
    "fsdp": draw_fsdp,
    "schedules": draw_schedules,
    "tensor": draw_tensor,
    "mesh": draw_mesh,
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
