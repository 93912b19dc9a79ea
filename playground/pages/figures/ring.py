"""Which chunk each rank sends in a ring all-reduce, and what it then holds."""

from pathlib import Path

from figures.style import BLUE, ORANGE, PALE, SKY, arrow, box, new_figure, save


def draw(counts: dict, path: Path) -> None:
    """Draw the chunks of each rank after each step, and an arrow for each one that it sends."""
    ranks = len(counts["sent"])
    steps = len(counts["sent"][0])
    colours = {1: "none", 2: PALE, 3: SKY, 4: BLUE}  # by how many chunks have been added
    title = f"After {steps} steps, each of {ranks} ranks has the sums of all chunks"
    figure, panels = new_figure(title, 2, ranks, 5.2)
    for step, axes in enumerate(panels.flat):
        axes.set_xlim(-0.1, ranks + 0.1)
        axes.set_ylim(-0.4, ranks + 0.8)
        axes.set_aspect("equal")
        axes.axis("off")
        if step > steps:
            break
        axes.set_title("at the start" if step == 0 else f"after step {step}")
        for rank in range(ranks):
            y = ranks - 1 - rank
            if step % ranks == 0:  # the first panel of a row
                axes.text(-0.2, y + 0.5, f"rank {rank}", ha="right", va="center")
            for number, added in enumerate(counts["held"][rank][step]):
                text = "".join("abcdefgh"[int(each)] for each in added)
                text = "sum" if len(added) == ranks else text
                box(axes, (number, y), (1, 1), colours[len(added)], text, fontsize=10)
        for rank in range(ranks):
            if step == steps:
                break
            number = counts["sent"][rank][step]
            y = ranks - 1 - rank
            box(axes, (number, y), (1, 1), "none", edgecolor=ORANGE, linewidth=3, zorder=3)
            # The rank below the last one is rank 0, so its arrow begins again at the top.
            starts = [y + 0.18] if rank < ranks - 1 else [0.18, ranks + 0.7]
            for start in starts:
                x = number + 0.5
                arrow(axes, (x, start), (x, start - 0.45), ORANGE, linewidth=2.5)
    half = steps // 2
    words = "Each rank sends\nthe orange chunk to\nthe rank below it,\nand rank 3 to rank 0.\n\n"
    words += f"reduce-scatter:\nsteps 1 to {half}\n\nall-gather:\nsteps {half + 1} to {steps}"
    panels[-1, -1].text(-0.2, ranks / 2, words, va="center", fontsize=11)
    save(figure, path)
