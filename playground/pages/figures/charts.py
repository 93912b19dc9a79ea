"""The figure of plan.py."""

from collections.abc import Iterable

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


def _stack(axes: Axes, names: list[str], sections: Iterable) -> None:
    """Draw a bar for each name. A section has its length in each of the bars, and a colour."""
    ends = [0.0] * len(names)
    for lengths, colour in sections:
        axes.barh(names, lengths, 0.6, left=ends, color=colour, edgecolor=INK, linewidth=0.6)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]


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
