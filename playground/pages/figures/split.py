"""What each rank has of attention that is split by heads or by tokens, and what it sends."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import context_parallel
import tensor_parallel
import torch
import torch.distributed as dist
import ulysses
from matplotlib.axes import Axes
from torch.nn import functional as F

from common.transformer import Attention
from figures.style import BLACK, COLOURS, GREY, VERMILLION, add_legend, box, new_figure, save
from watching.messages import Messages

RANKS = 4
TOKENS = 16
WIDTH = 32
HEADS = 4
IMAGES = 120


def count() -> dict[str, dict]:
    """Split a layer of attention in three ways, and count what a rank has and sends in a step.

    Returns:
        For "heads", "ring" and "ulysses" a dict: "between" and "inside" have the (heads, tokens) of
        a rank between layers of attention and inside, "parameters" how many numbers it has, and
        "sent" the bytes that it sends in both passes.
    """
    world_size = dist.get_world_size()
    counts = {}
    for way in ("heads", "ring", "ulysses"):
        torch.manual_seed(0)
        layer = Attention(WIDTH, HEADS)
        places = context_parallel.plain(TOKENS, world_size)
        tokens = TOKENS
        if way == "heads":
            split_heads(layer)
        else:
            attend = ulysses.ulysses_attention
            if way == "ring":
                attend = partial(context_parallel.ring_attention, positions=places)
            attend = partial(attend, group=dist.group.WORLD)
            layer.forward = partial(ulysses.attend_to_all, layer, attend)
            tokens = len(places[dist.get_rank()])
        inputs = torch.randn(IMAGES, tokens, WIDTH, requires_grad=True)
        shapes = []
        patch = mock.patch.object(F, "scaled_dot_product_attention", _note_shape(shapes))
        with patch, Messages() as messages:
            layer(inputs).sum().backward()
        inside = shapes[0] if shapes else [HEADS, tokens]
        counts[way] = {
            "between": [HEADS, tokens],
            "inside": inside,
            "parameters": sum(parameter.numel() for parameter in layer.parameters()),
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


def split_heads(layer: Attention) -> None:
    """Keep some heads of this layer on this rank, with functions of tensor_parallel.py."""
    for columns in (layer.query, layer.key, layer.value):
        columns.weight = tensor_parallel.keep_shard(columns.weight, dim=0)
        columns.bias = tensor_parallel.keep_shard(columns.bias, dim=0)
    layer.output = tensor_parallel.RowLinear(layer.output)
    pair = tensor_parallel.nothing, tensor_parallel.all_reduce, None
    layer.register_forward_pre_hook(lambda _, inputs: tensor_parallel.Message.apply(*inputs, *pair))


def draw(counts: dict, path: Path) -> None:
    """Draw which heads and tokens each rank has, and below it what it sends."""
    titles = {"heads": "by heads", "ring": "by tokens: ring", "ulysses": "by tokens: Ulysses"}
    travels = {  # in a forward pass, from the upper row to the lower one and back
        "heads": "\u2191 all_reduce",
        "ring": "keys and values \u21ba",
        "ulysses": "\u2193 all_to_all \u2191",
    }
    title = "Four ranks split attention: with Ulysses, they send least"
    figure, panels = new_figure(title, 2, len(counts), 4.2)
    for column, (way, count) in enumerate(counts.items()):
        between, inside = panels[:, column]
        _draw_grid(between, count["between"])
        _draw_grid(inside, count["inside"])
        between.set_title(titles[way], weight="bold")
        inside.set_title(travels[way], color=VERMILLION, weight="bold")
        sent = f"a rank sends {count['sent'] / 1000:,.0f} kB,"
        inside.set_xlabel(f"tokens \u2192\n{sent}\nhas {count['parameters']:,} parameters")
    look = {"rotation": 0, "ha": "right", "va": "center"}
    panels[0, 0].set_ylabel("between\nlayers:\nheads \u2193", **look)
    panels[1, 0].set_ylabel("inside:\nheads \u2193", **look)
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
