"""The figure of plan.py."""

from figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE_GREEN,
    PINK,
    SKY,
    VERMILLION,
    YELLOW,
    add_legend,
    new_figure,
    save,
)

PARTS = {  # of what a plan holds, and of its step, with the names of judge() in plan.py
    "state": ("parameters, gradients, Adam's averages", GREEN),
    "activations": ("activations", PALE_GREEN),
    "computing": ("computing", BLUE),
    "again": ("computing again", SKY),
    "bubble": ("bubble of the pipeline", GREY),
    "pp": ("waiting for pp (pipeline)", VERMILLION),
    "dp": ("waiting for dp (data)", ORANGE),
    "cp": ("waiting for cp (context)", YELLOW),
    "tp": ("waiting for tp (tensor)", PINK),
}


def draw_plans(rows: list[dict], limit: float, path: str) -> None:
    """Draw what a rank holds in each plan, beside the parts of its step.

    Args:
        rows: of judge() in plan.py, the shortest step first.
        limit: bytes that a GPU has for what a rank holds.
        path: of the figure.
    """
    names = []
    for row in rows:
        plan = row["plan"]
        sizes = {"pp": plan.pp, "dp": plan.dp, "cp": plan.cp, "tp": plan.tp}
        axes = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
        checkpointing = f", again {plan.again}" if plan.again else ""
        names.append(f"{plan.data}{checkpointing}:\n{', '.join(axes)}")
    ranks = plan.pp * plan.dp * plan.cp * plan.tp
    computing = rows[0]["parts"]["computing"] / rows[0]["step"]
    title = f"On {ranks} GPUs, the fastest plan computes for {computing:.0%} of its step"
    figure, [[memory, step]] = new_figure(title, 1, 2, 2.5 + 0.6 * len(rows), sharey=True)
    places = range(len(rows))
    drawn = {}
    for axes, group, unit in ((memory, "held", 1e9), (step, "parts", 1)):
        ends = [0.0] * len(rows)
        for part in rows[0][group]:
            name, colour = PARTS[part]
            lengths = [row[group][part] / unit for row in rows]
            axes.barh(places, lengths, 0.6, left=ends, color=colour, edgecolor=BLACK, linewidth=0.6)
            ends = [end + length for end, length in zip(ends, lengths, strict=True)]
            if any(lengths):
                drawn[name] = colour
    memory.set_yticks(places, names)
    memory.invert_yaxis()  # the first bar is at the top
    memory.axvline(limit / 1e9, color=INK, linestyle="--", linewidth=1)
    memory.set_xlabel("GB on a GPU (dashed: its limit)")
    step.set_xlabel("seconds of a step")
    add_legend(figure, drawn, columns=2)
    save(figure, path)
