"""Pictures of attention on several ranks, drawn from counts of context_parallel.py.

count_... is called on each rank of a process group on CPUs, and returns the same on all ranks, as
in counts.py. draw_... takes these counts and the path of a PNG, as in pictures.py.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

PLAYGROUND = Path(__file__).resolve().parents[1]
sys.path += [str(PLAYGROUND / part) for part in ("split", "transformer")]  # find the lessons
sys.path.append(str(PLAYGROUND.parent))  # find common/
import context_parallel
import tensor_parallel
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from common.models import Attention
from figures.messages import Messages
from figures.ranks import of_all_ranks
from figures.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PINK,
    VERMILLION,
    add_legend,
    new_figure,
    save,
)

COLOURS = [BLUE, ORANGE, GREEN, PINK]  # of the ranks
TOKENS = 16
WIDTH = 32
HEADS = 4
IMAGES = 120


# The ring with the causal mask


def count_context() -> dict[str, dict]:
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


def draw_context(counts: dict, path: Path) -> None:
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
                    look = {"facecolor": colour, "edgecolor": edge, "linewidth": 0.5}
                    hatch = None if seen else "////"
                    panel.add_patch(Rectangle((key, query), 1, 1, hatch=hatch, **look))
            for left, right in _runs(keys):
                for top, bottom in _runs(queries):
                    if left >= bottom:
                        continue  # all of it is masked
                    ink = "white" if COLOURS[rank] in (BLUE, GREEN) else INK
                    look = {"ha": "center", "va": "center", "weight": "bold", "fontsize": 13}
                    # Of a block on the diagonal, the lower left part is not masked.
                    shift = (right - left) / 6 if left == top else 0
                    x = (left + right) / 2 - shift
                    y = (top + bottom) / 2 + shift
                    panel.text(x, y, step + 1, color=ink, **look)
    panel.add_patch(Rectangle((0, 0), tokens, tokens, fill=False, edgecolor=INK, linewidth=1))
    panel.set_xlim(-0.1, tokens + 0.1)
    panel.set_ylim(tokens + 0.1, -0.1)  # the first token is on top
    panel.set_aspect("equal")
    panel.set_xticks([])
    panel.set_yticks([])
    for spine in panel.spines.values():
        spine.set_visible(False)
    panel.set_xlabel("keys")


def _runs(places: list[int]) -> list[tuple[int, int]]:
    """Return the start and the end of each run of successive places."""
    runs = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs


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
            look = {"facecolor": COLOURS[rank], "edgecolor": "white", "linewidth": 1.5}
            panel.add_patch(Rectangle(corner, number, 0.8, **look))
            ink = "white" if COLOURS[rank] in (BLUE, GREEN) else INK
            middle = (end + number / 2, ranks - 0.6 - rank)
            panel.text(*middle, step + 1, ha="center", va="center", color=ink, weight="bold")
            end += number
        panel.text(end + 1, ranks - 0.6 - rank, end, va="center")
        most = max(most, end)
    heights = [ranks - 0.6 - rank for rank in range(ranks)]
    panel.set_yticks(heights, [f"rank {rank}" for rank in range(ranks)])
    panel.tick_params(axis="y", length=0)
    panel.set_ylim(-0.1, ranks)
    panel.set_xlabel("scores computed, in steps 1 to 4")
    return most


# Attention split by heads and by tokens


def count_split() -> dict[str, dict]:
    """Split a layer of attention in three ways, and count what a rank has and sends in a step.

    Returns:
        For "heads", "ring" and "ulysses" a dict: "between" and "inside" have the (heads, tokens) of
        a rank between layers of attention and inside, "parameters" how many numbers it has, "kind"
        and "messages" what it sends, and "sent" the bytes.
    """
    world_size = dist.get_world_size()
    counts = {}
    for way in ("heads", "ring", "ulysses"):
        torch.manual_seed(0)
        whole = Attention(WIDTH, HEADS)
        places = context_parallel.plain(TOKENS, world_size)
        tokens = TOKENS
        if way == "heads":
            layer = SplitHeads(whole)
        else:
            attend = context_parallel.ATTENTION[way]
            arguments = (whole, attend, places, dist.group.WORLD)
            whole.forward = partial(context_parallel.attend_to_all, *arguments)
            layer = whole
            tokens = len(places[dist.get_rank()])
        inputs = torch.randn(IMAGES, tokens, WIDTH, requires_grad=True)
        shapes = []
        patch = mock.patch.object(F, "scaled_dot_product_attention", _note_shape(shapes))
        with patch, Messages() as messages:
            output = layer(inputs)
            output.sum().backward()
        kinds = {message.kind for message in messages.noted if message.sent}
        inside = shapes[0] if shapes else [HEADS, tokens]
        counts[way] = {
            "between": [HEADS, tokens],
            "inside": inside,
            "parameters": sum(parameter.numel() for parameter in layer.parameters()),
            "kind": kinds.pop(),
            "messages": len([message for message in messages.noted if message.sent]),
            "sent": messages.sent(),
        }
    return counts


def _note_shape(shapes: list) -> Any:
    """Return PyTorch's attention, which also notes the heads and the tokens of its queries."""
    attend = F.scaled_dot_product_attention

    def noted(query, key, value, **options):
        shapes.append(list(query.shape[1:3]))
        return attend(query, key, value, **options)

    return noted


class SplitHeads(nn.Module):
    """Attention of which this rank has some heads, with the two functions of tensor_parallel.py."""

    def __init__(self, whole: Attention):
        super().__init__()
        self.split_heads = whole.split_heads
        for name in ("query", "key", "value"):
            layer = getattr(whole, name)
            layer.weight = tensor_parallel.keep_shard(layer.weight, dim=0)
            layer.bias = tensor_parallel.keep_shard(layer.bias, dim=0)
            setattr(self, name, layer)
        self.output = tensor_parallel.RowLinear(whole.output)

    def forward(self, inputs: Tensor) -> Tensor:
        """Turn tokens, (N, tokens, width), into what each token has read from the others."""
        inputs = tensor_parallel.AddGradients.apply(inputs)
        query = self.split_heads(self.query(inputs))
        key = self.split_heads(self.key(inputs))
        value = self.split_heads(self.value(inputs))
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(read.transpose(1, 2).flatten(2))


def draw_split(counts: dict, path: Path) -> None:
    """Draw which heads and tokens each rank has, and below it what it sends."""
    titles = {"heads": "by heads", "ring": "by tokens: ring", "ulysses": "by tokens: Ulysses"}
    travels = {
        "heads": "\u2191 all_reduce",
        "ring": "keys and values \u21ba",
        "ulysses": "\u2193 all_to_all \u2191",
    }
    figure, panels = new_figure(2, len(counts), 5.1)
    for column, (way, count) in enumerate(counts.items()):
        between, inside = panels[:, column]
        _draw_grid(between, count["between"])
        _draw_grid(inside, count["inside"])
        between.set_title(titles[way], weight="bold", fontsize=14)
        inside.set_title(travels[way], fontsize=13, color=VERMILLION, weight="bold")
        facts = [f"{count['messages']} {count['kind']}", f"{count['sent'] / 1000:,.0f} kB"]
        facts.append(f"{count['parameters']:,}")
        _write_below(inside, 0.5, "center", ["tokens \u2192", "", *facts])
    _write_below(panels[1, 0], -0.03, "right", ["", "", "messages", "sent", "parameters"])
    panels[0, 0].set_ylabel("LayerNorm\n\u2190 heads")
    panels[1, 0].set_ylabel("attention\n\u2190 heads")
    names = {f"rank {rank}": COLOURS[rank] for rank in range(len(COLOURS))}
    add_legend(figure, names | {"every rank": GREY})
    save(figure, path)


def _write_below(panel: Axes, x: float, side: str, lines: list[str]) -> None:
    """Write lines of text below a panel. Empty lines keep the others at the same height."""
    look = {"ha": side, "va": "top", "transform": panel.transAxes}
    for number, line in enumerate(lines):
        panel.text(x, -0.08 - 0.17 * number, line, **look)


def _draw_grid(panel: Axes, of_rank: list[int]) -> None:
    """Draw heads from top to bottom and tokens from left to right, in the colours of the ranks."""
    heads, tokens = of_rank
    for head in range(HEADS):
        for token in range(TOKENS):
            colour = GREY
            if heads < HEADS:
                colour = COLOURS[head // heads]
            if tokens < TOKENS:
                colour = COLOURS[token // tokens]
            look = {"facecolor": colour, "edgecolor": "white", "linewidth": 0.8}
            panel.add_patch(Rectangle((token, 2 * head), 1, 2, **look))
    panel.set_xlim(-0.2, TOKENS + 0.2)
    panel.set_ylim(2 * HEADS + 0.2, -0.2)
    panel.set_aspect("equal")
    panel.set_xticks([])
    panel.set_yticks([])
    for spine in panel.spines.values():
        spine.set_visible(False)
