"""The figures of compare.py and plan.py.

Each function takes runs, or the rows of a table, and the path of a PNG. Runs that have failed are
left out. If no run is left, no figure is drawn.
"""

from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes

from figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE_ORANGE,
    PINK,
    SKY,
    VERMILLION,
    add_legend,
    new_figure,
    save,
)

PARTS = {  # of what a plan holds, and of its step, with the names of judge() in plan.py
    "state": ("parameters, gradients, Adam's averages", GREEN),
    "activations": ("activations", PINK),
    "computing": ("computing", BLUE),
    "again": ("computing again", SKY),
    "bubble": ("bubble", GREY),
    "pp": ("waiting for pp", VERMILLION),
    "dp": ("waiting for dp", ORANGE),
    "cp": ("waiting for cp", PALE_ORANGE),
    "tp": ("waiting for tp", INK),
}


def _label(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Write the names of two lines beside their right ends, the name of the upper line above."""
    from_the_top = sorted(ends.items(), key=lambda item: -item[1][1])
    for place, (text, end) in enumerate(from_the_top):
        offset = (9, 7 - 14 * place)
        axes.annotate(text, end, xytext=offset, textcoords="offset points", va="center")


def _stack(axes: Axes, names: list[str], sections: Iterable) -> None:
    """Draw a bar for each name. A section has its length in each of the bars, and a colour."""
    ends = [0.0] * len(names)
    for lengths, colour in sections:
        axes.barh(names, lengths, 0.6, left=ends, color=colour, edgecolor=INK, linewidth=0.6)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]


def draw_steps(runs: list, path: Path) -> None:
    """Draw the step of each run as a bar with a section for each use of its time."""
    runs = [run for run in reversed(runs) if not run.failed]
    if not runs:
        return
    names = [run.name.replace(", ", ",\n").replace(" --", "\n--") for run in runs]
    sections = {  # the lengths of each section, and its colour
        "data": ([run.data for run in runs], GREY),
        "computing": ([run.compute - run.hidden for run in runs], BLUE),
        "computing that hides messages": ([run.hidden for run in runs], SKY),
        "messages": ([run.waiting for run in runs], ORANGE),
    }
    figure, [[axes]] = new_figure(1, 1, 1.4 + 0.8 * len(runs))
    _stack(axes, names, sections.values())
    axes.set_xlabel("ms of a traced step")
    add_legend(figure, {name: colour for name, (_, colour) in sections.items()})
    save(figure, path)


def draw_plans(rows: list[dict], limit: float, path: str) -> None:
    """Draw what a rank holds in each plan, beside the parts of its step.

    Args:
        rows: of judge() in plan.py.
        limit: bytes that a GPU has for what a rank holds.
        path: of the figure.
    """
    rows = rows[::-1]  # the first bar is at the bottom
    names = []
    for row in rows:
        plan = row["plan"]
        checkpointing = f", again {plan.again}" if plan.again else ""
        mesh = f"{plan.pp}x{plan.dp}x{plan.cp}x{plan.tp}"
        names.append(f"{plan.data} {mesh}\n{plan.count}x{plan.micro}{checkpointing}")
    figure, [[memory, step]] = new_figure(1, 2, 1.8 + 0.6 * len(rows), sharey=True)
    drawn = {}
    for axes, group, unit in ((memory, "held", 1e9), (step, "parts", 1)):
        sections = []
        for part in rows[0][group]:
            name, colour = PARTS[part]
            lengths = [row[group][part] / unit for row in rows]
            sections.append((lengths, colour))
            if any(lengths):
                drawn[name] = colour
        _stack(axes, names, sections)
    memory.axvline(limit / 1e9, color=INK, linestyle="--", linewidth=1)
    memory.set_xlabel("GB of a rank (dashed: what a GPU has)")
    step.set_xlabel("seconds of a step")
    add_legend(figure, drawn, columns=3)
    save(figure, path)


def draw_widths(rows: list[dict], path: Path) -> None:
    """Draw both speeds over the width, and below them the share of messages in a step."""
    lines = {}
    for name in ("one", "several", "messages"):
        lines[name] = [(row["width"], row[name]) for row in rows if row[name] is not None]
        if not lines[name]:
            return
    figure, panels = new_figure(2, 1, 6, sharex=True, height_ratios=(2, 1))
    speed, share = panels[:, 0]
    speed.plot(*zip(*lines["one"], strict=True), "o-", color=BLUE, linewidth=2, markersize=8)
    speed.plot(*zip(*lines["several"], strict=True), "s--", color=ORANGE, linewidth=2, markersize=8)
    _label(speed, {"one process": lines["one"][-1], "DDP": lines["several"][-1]})
    share.plot(*zip(*lines["messages"], strict=True), "^-", color=ORANGE, linewidth=2, markersize=8)
    speed.set(ylabel="images/s", xscale="log", yscale="log")
    speed.margins(y=0.15)  # room for the name of the lower line
    speed.yaxis.set_major_formatter(_round_number)
    speed.yaxis.set_minor_formatter(_round_number)
    widths = [row["width"] for row in rows]
    share.set_xticks(widths, widths)
    share.minorticks_off()
    share.set_xlabel("width: neurons in each hidden layer")
    share.set_ylabel("share of messages\nin a step of DDP")
    share.set_ylim(0, 1)
    share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    save(figure, path)


def _round_number(value: float, _: int) -> str:
    """Return the label of a tick: a number that begins with 1, 2 or 5; others get none."""
    first_digit = f"{value:e}"[0]
    return f"{value:,.0f}" if first_digit in "125" else ""
