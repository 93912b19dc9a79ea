"""Which scores each rank computes in the ring of context_parallel.py, in both orders."""

from pathlib import Path

from matplotlib.axes import Axes

from figures.style import COLOURS, INK, add_legend, box, new_figure, save

RANKS = 4
TOKENS = 16


def draw(counts: dict, path: Path) -> None:
    """Draw who computes which scores, and how many each rank computes in each step."""
    title = "In zigzag order, all ranks compute equally many scores"
    figure, panels = new_figure(title, 2, 2, 6.2, height_ratios=[2.6, 1], sharex="row")
    for column, (order, count) in enumerate(counts.items()):
        panels[0, column].set_title(f"--order {order}")
        _draw_scores(panels[0, column], count)
        _draw_work(panels[1, column], count)
    panels[0, 0].set_ylabel("queries")
    names = {f"rank {rank}": COLOURS[rank] for rank in range(RANKS)}
    add_legend(figure, names | {"faint: computed, but masked": "#B4B4B466"})
    save(figure, path)


def _draw_scores(panel: Axes, count: dict) -> None:
    """Draw the scores of all queries and keys in the colours of the ranks that compute them."""
    for rank, steps in enumerate(count["blocks"]):
        for queries, keys in steps:
            for query in queries:
                seen = [key for key in keys if key <= query]
                masked = [key for key in keys if key > query]
                for some, colour in ((seen, COLOURS[rank]), (masked, f"{COLOURS[rank]}55")):
                    for left, right in runs(some):
                        box(panel, (left, query), (right - left, 1), colour, linewidth=0)
    for line in range(TOKENS + 1):
        panel.axvline(line, color=INK, linewidth=0.3)
        panel.axhline(line, color=INK, linewidth=0.3)
    panel.set_xlim(0, TOKENS)
    panel.set_ylim(TOKENS, 0)  # the first token is on top
    panel.set_aspect("equal")
    panel.set(xticks=[], yticks=[], xlabel="keys")


def runs(numbers: list[int]) -> list[list[int]]:
    """Return ascending numbers as a list of first numbers and ends: 0 1 2 6 7 is [0, 3], [6, 8]."""
    found = []
    for number in numbers:
        if found and found[-1][1] == number:
            found[-1][1] += 1
        else:
            found.append([number, number + 1])
    return found


def _draw_work(panel: Axes, count: dict) -> None:
    """Draw how many scores each rank computes, step after step."""
    for rank, steps in enumerate(count["blocks"]):
        end = 0
        for step, (queries, keys) in enumerate(steps, start=1):
            number = len(queries) * len(keys)
            if number > 0:
                box(panel, (end, -rank), (number, 0.8), COLOURS[rank], step, fontsize=11)
            end += number
        panel.text(end + 1, 0.4 - rank, end, va="center")
    panel.set_yticks([0.4, -0.6, -1.6, -2.6], [f"rank {rank}" for rank in range(RANKS)])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(0.9 - RANKS, 1)
    panel.set_xlim(0, 73)
    panel.set_xlabel("scores, in steps 1 to 4 of the ring")
