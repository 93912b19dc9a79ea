"""Which ranks of four_axes.py have which part of a parameter, of its gradient, of an activation."""

from pathlib import Path

from figures.style import BLUE, GREEN, SKY, add_legend, box, new_figure, save

ROWS, ROW = 8, 128  # of the text in a global batch, and bytes of a row
HIGH = 0.7  # of a box


def draw(counts: list, path: Path) -> None:
    """Draw two panels. In each, the ranks of the second stage have a box that is partly filled."""
    [(_, weight_rows)] = counts[-1]["term"]  # the last rank has the last rows
    title = "What the ranks of stage 1 have of a weight and of its input:\n"
    title += "tp and FSDP split the weight, dp and cp the tokens"
    figure, panels = new_figure(title, 1, 2, 5)
    titles = (
        "a weight: rows \u2192 (tp, FSDP)",
        "its input: texts \u2193 (dp),\ntokens \u2192 (cp)",
    )
    for panel, title in zip(panels[0], titles, strict=True):
        panel.set_title(title, weight="bold")
        for rank, has in enumerate(counts):
            pp, dp, cp, tp = has["place"]
            if pp == 0:
                continue  # it has another layer
            corner = (1.1 * tp, -1.2 * (2 * dp + cp))
            if title == titles[0]:
                parts = parts_of_weight(has["term"], weight_rows, SKY)
                parts += parts_of_weight(has["shard"], weight_rows, BLUE)
            else:
                parts = parts_of_input(has, GREEN)
            for left, bottom, width, height, colour in parts:
                place = (corner[0] + left, corner[1] + HIGH * bottom)
                box(panel, place, (width, HIGH * height), colour, linewidth=0)
            box(panel, corner, (1, HIGH), "none")
            middle = corner[0] + 0.5
            panel.text(middle, corner[1] + 0.74, f"rank {rank}", ha="center", va="bottom")
            if tp == 0:
                y = corner[1] + HIGH / 2
                panel.text(-0.08, y, f"dp {dp}\ncp {cp}", ha="right", va="center")
        for tp in (0, 1):
            panel.text(1.1 * tp + 0.5, 1.15, f"tp {tp}", ha="center", va="bottom")
        panel.set_xlim(-0.45, 2.15)
        panel.set_ylim(-3.7, 1.5)
        panel.axis("off")
    colours = {
        "computes with this half (tp)": SKY,
        "keeps this eighth (FSDP)": BLUE,
        "its tokens: every second text (dp), half of it (cp)": GREEN,
    }
    add_legend(figure, colours, columns=2)
    save(figure, path)


def parts_of_weight(spans_of_rows: list, count: int, colour: str) -> list[tuple]:
    """Return the parts of a box, as wide as `count` rows of a weight, that some rows fill."""
    return [(first / count, 0, (end - first) / count, 1, colour) for first, end in spans_of_rows]


def parts_of_input(has: dict, colour: str) -> list[tuple]:
    """Return the parts of a box that some rows, from above, and tokens of them, fill."""
    parts = []
    for top, bottom in has["rows"]:
        for first, end in has["tokens"]:
            size = ((end - first) / ROW, (bottom - top) / ROWS)
            parts.append((first / ROW, 1 - bottom / ROWS, *size, colour))
    return parts
