"""What each rank has of attention that is split by heads or by tokens, and what it sends."""

from pathlib import Path

from matplotlib.axes import Axes

from figures.style import BLACK, COLOURS, GREY, VERMILLION, add_legend, box, new_figure, save

TOKENS = 16
HEADS = 4


def draw(counts: dict, path: Path) -> None:
    """Draw which heads and tokens each rank has, and below it what it sends."""
    titles = {"heads": "by heads", "ulysses": "by tokens: Ulysses"}
    travels = {  # in a forward pass, from the upper row to the lower one and back
        "heads": "\u2191 all_reduce",
        "ulysses": "\u2193 all_to_all \u2191",
    }
    title = "Four ranks split attention: with Ulysses, they send half"
    figure, panels = new_figure(title, 2, len(counts), 4.2)
    for column, (way, count) in enumerate(counts.items()):
        between, inside = panels[:, column]
        _draw_grid(between, count["between"])
        _draw_grid(inside, count["inside"])
        between.set_title(titles[way], weight="bold")
        inside.set_title(travels[way], color=VERMILLION, weight="bold")
        sent = f"a rank sends {count['sent'] / 1000:,.0f} kB"
        inside.set_xlabel(
            f"tokens \u2192\n{sent}\nin a step, and has\n{count['parameters']:,} parameters"
        )
    look = {"rotation": 0, "ha": "right", "va": "center"}
    panels[0, 0].set_ylabel("between\nlayers of\nattention\n(heads \u2193)", **look)
    panels[1, 0].set_ylabel("inside\nattention\n(heads \u2193)", **look)
    names = {f"rank {rank}": COLOURS[rank] for rank in range(len(COLOURS))}
    add_legend(figure, names | {"every rank": GREY})
    save(figure, path)


def _draw_grid(panel: Axes, of_rank: list[int]) -> None:
    """Draw heads from top to bottom and tokens from left to right, in the colours of the ranks."""
    heads, tokens = of_rank
    for head in range(0, HEADS, heads):
        for token in range(0, TOKENS, tokens):
            rank = head // heads + token // tokens
            colour = GREY if of_rank == [HEADS, TOKENS] else COLOURS[rank]
            box(panel, (token, 2 * head), (tokens, 2 * heads), colour)
    panel.vlines(range(TOKENS + 1), 0, 2 * HEADS, BLACK, linewidth=0.5)
    panel.hlines(range(0, 2 * HEADS + 1, 2), 0, TOKENS, BLACK, linewidth=0.5)
    panel.set_xlim(-0.2, TOKENS + 0.2)
    panel.set_ylim(2 * HEADS + 0.2, -0.2)
    panel.set_aspect("equal")
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
