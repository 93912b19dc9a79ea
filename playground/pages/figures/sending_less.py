"""How fast several ways of data parallelism train over 10 Mbit/s, in runs of sending_less.py."""

from pathlib import Path

from figures.style import BLUE, INK, ORANGE, PINK, VERMILLION, new_figure, save

COLOURS = (INK, ORANGE, PINK, BLUE, VERMILLION)
LABELS = {  # of the lines: at which dot, how far from it, and where the text ends at this place
    "DDP": ("DDP, batch of 128", 0, (6, -14), "right"),
    "local": ("local SGD", -1, (8, -4), "left"),
    "diloco": ("DiLoCo", 0, (-8, 0), "right"),
    "batch of 1280": ("DDP, batch of 1280", 0, (8, 6), "left"),
    "batch of 5120": ("DDP, batch of 5120", 0, (8, 0), "left"),
}
WRONG = (2, 3, 4, 6, 10, 20)  # marks of an axis
SECONDS = (2, 5, 10, 20, 50, 100)


def draw(counts: dict, path: Path) -> None:
    """Draw the errors of the ways over the seconds of training. A dot is the end of an epoch."""
    figure, panels = new_figure("Over 10 Mbit/s, sending less trains sooner", 2, 1, 7, sharex=True)
    for panel, (ranks, runs) in zip(panels[:, 0], counts.items(), strict=True):
        for (way, found), colour in zip(runs.items(), COLOURS, strict=True):
            wrong = [100 - accuracy for accuracy in found["test"]]
            panel.plot(found["seconds"], wrong, color=colour, marker="o", markersize=4)
            name, place, offset, side = LABELS[way]
            dot = (found["seconds"][place], wrong[place])
            look = {"textcoords": "offset points", "weight": "bold"}
            panel.annotate(name, dot, offset, ha=side, va="center", **look)
        goal = runs["DDP"]["test"][-1]
        seconds = {}
        for way in ("DDP", "diloco"):
            reached = zip(runs[way]["seconds"], runs[way]["test"], strict=True)
            seconds[way] = min(second for second, test in reached if test >= goal)
        text = "{}: {wrong:.0f}% wrong after {DDP:.0f} s with DDP, {diloco:.0f} s with DiLoCo"
        panel.set_title(text.format(ranks, wrong=100 - goal, **seconds), loc="left")
        panel.text(0.01, 0.03, "\u2199 better", transform=panel.transAxes)
        panel.set(xscale="log", yscale="log", ylabel="% wrong in the test (log scale)")
        panel.set_yticks(WRONG, [str(mark) for mark in WRONG])
        panel.minorticks_off()
        panel.grid()
    panel.set_xticks(SECONDS, [str(mark) for mark in SECONDS])
    panel.set_xlim(1.7, 200)
    panel.set_xlabel("seconds of training (log scale); a dot is the end of an epoch")
    save(figure, path)
