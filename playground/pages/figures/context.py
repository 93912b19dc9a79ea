"""Which scores each rank computes in the ring of context_parallel.py, in both orders."""

from pathlib import Path
from unittest import mock

import context_parallel
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from torch import Tensor

from figures.counting import of_all_ranks, runs
from figures.style import COLOURS, INK, box, ink_on, new_figure, save

RANKS = 4
TOKENS = 16


def count() -> dict[str, dict]:
    """Note which blocks of scores each rank computes in the ring, for both orders of the tokens.

    Returns:
        For each order "places" (of each rank's tokens), and "blocks": for each rank a list with an
        entry for each step. It has the places of the queries and of the keys whose scores are
        computed; both are empty if the rank computes nothing in this step.
    """
    counts = {}
    for name, order in context_parallel.ORDERS.items():
        places = order(TOKENS, dist.get_world_size())
        counts[name] = {
            "places": [mine.tolist() for mine in places],
            "blocks": of_all_ranks(_blocks(places)),
        }
    return counts


def _blocks(places: list[Tensor]) -> list:
    """Return the queries and keys of each step of this rank, as lists of places."""
    rank = dist.get_rank()
    steps = [([], []) for _ in places]
    scores_of = context_parallel.scores_of

    def noted(query, key, query_places, key_places):
        for source, theirs in enumerate(places):
            if key_places[0] in theirs:
                step = (rank - source) % len(places)
        steps[step] = (query_places.tolist(), key_places.tolist())
        return scores_of(query, key, query_places, key_places)

    query = torch.randn(1, 1, len(places[rank]), 4)
    with mock.patch.object(context_parallel, "scores_of", noted), torch.no_grad():
        context_parallel.RingAttention.apply(query, query, query, places, dist.group.WORLD)
    return steps


def draw(counts: dict, path: Path) -> None:
    """Draw who computes which scores, and how many each rank computes in each step."""
    titles = {"plain": "--order plain", "zigzag": "--order zigzag"}
    figure, panels = new_figure(2, 2, 6.9, height_ratios=[2.6, 1])
    most = 0
    for panel, (order, count) in zip(panels[0], counts.items(), strict=True):
        _draw_scores(panel, count)
        panel.set_title(titles[order], weight="bold", fontsize=14)
    for panel, count in zip(panels[1], counts.values(), strict=True):
        most = max(most, _draw_work(panel, count))
    for panel in panels[1]:
        panel.set_xlim(0, 1.14 * most)
    panels[0, 0].set_ylabel("queries")
    patches = []
    for rank, colour in enumerate(COLOURS):
        patches.append(Patch(facecolor=colour, edgecolor=INK, linewidth=0.6, label=f"rank {rank}"))
    masked = Patch(facecolor="white", edgecolor=INK, hatch="////", label="computed, but masked")
    figure.legend(handles=[*patches, masked], loc="outside upper center", ncols=5)
    save(figure, path)


def _draw_scores(panel: Axes, count: dict) -> None:
    """Draw the scores of all queries and keys. A number is the step in which they are computed."""
    tokens = sum(len(mine) for mine in count["places"])
    for rank, steps in enumerate(count["blocks"]):
        for step, (queries, keys) in enumerate(steps):
            for query in queries:
                for key in keys:
                    seen = key <= query
                    colour = COLOURS[rank] if seen else "white"
                    edge = "white" if seen else COLOURS[rank]
                    look = {"edgecolor": edge, "linewidth": 0.5, "hatch": None if seen else "////"}
                    box(panel, (key, query), (1, 1), colour, **look)
            for left, right in runs(keys):
                for top, bottom in runs(queries):
                    if left >= bottom:
                        continue  # all of it is masked
                    look = {"ha": "center", "va": "center", "weight": "bold", "fontsize": 13}
                    # Of a block on the diagonal, the lower left part is not masked.
                    shift = (right - left) / 6 if left == top else 0
                    x = (left + right) / 2 - shift
                    y = (top + bottom) / 2 + shift
                    panel.text(x, y, step + 1, color=ink_on(COLOURS[rank]), **look)
    box(panel, (0, 0), (tokens, tokens), "none", linewidth=1)
    panel.set_xlim(-0.1, tokens + 0.1)
    panel.set_ylim(tokens + 0.1, -0.1)  # the first token is on top
    panel.set_aspect("equal")
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
    panel.set_xlabel("keys")


def _draw_work(panel: Axes, count: dict) -> int:
    """Draw how many scores each rank computes, step after step. Returns the largest number."""
    most = 0
    ranks = len(count["blocks"])
    for rank, steps in enumerate(count["blocks"]):
        end = 0
        for step, (queries, keys) in enumerate(steps):
            number = len(queries) * len(keys)
            if number == 0:
                continue
            corner = (end, ranks - 1 - rank)
            box(panel, corner, (number, 0.8), COLOURS[rank], edgecolor="white", linewidth=1.5)
            look = {"ha": "center", "va": "center", "weight": "bold"}
            middle = (end + number / 2, ranks - 0.6 - rank)
            panel.text(*middle, step + 1, color=ink_on(COLOURS[rank]), **look)
            end += number
        panel.text(end + 1, ranks - 0.6 - rank, end, va="center")
        most = max(most, end)
    heights = [ranks - 0.6 - rank for rank in range(ranks)]
    panel.set_yticks(heights, [f"rank {rank}" for rank in range(ranks)])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(-0.1, ranks)
    panel.set_xlabel("scores computed, in steps 1 to 4")
    return most
