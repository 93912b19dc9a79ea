"""What each rank has of attention that is split by heads or by tokens, and what it sends."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import context_parallel
import tensor_parallel
import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch.nn import functional as F

from common.transformer import Attention
from figures.style import COLOURS, GREY, VERMILLION, add_legend, box, new_figure, save
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
        a rank between layers of attention and inside, "parameters" how many numbers it has,
        "forward" and "backward" what it sends in each pass, and "sent" the bytes of both.
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
        with patch, Messages() as forward:
            output = layer(inputs)
        with Messages() as backward:
            output.sum().backward()
        inside = shapes[0] if shapes else [HEADS, tokens]
        counts[way] = {
            "between": [HEADS, tokens],
            "inside": inside,
            "parameters": sum(parameter.numel() for parameter in layer.parameters()),
            "sent": forward.sent() + backward.sent(),
        }
        for name, messages in (("forward", forward), ("backward", backward)):
            sending = [message.kind for message in messages.noted if message.sent]
            counts[way][name] = f"{len(sending)} {sending[0]}"
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


def draw(counts: dict, path: Path) -> None:
    """Draw which heads and tokens each rank has, and below it what it sends."""
    titles = {"heads": "by heads", "ring": "by tokens: ring", "ulysses": "by tokens: Ulysses"}
    travels = {  # in a forward pass, from the upper row to the lower one and back
        "heads": "\u2191 all_reduce",
        "ring": "keys and values \u21ba",
        "ulysses": "\u2193 all_to_all \u2191",
    }
    figure, panels = new_figure(2, len(counts), 5.3)
    for column, (way, count) in enumerate(counts.items()):
        between, inside = panels[:, column]
        _draw_grid(between, count["between"])
        _draw_grid(inside, count["inside"])
        between.set_title(titles[way], weight="bold", fontsize=14)
        inside.set_title(travels[way], fontsize=13, color=VERMILLION, weight="bold")
        facts = [count["forward"], count["backward"], f"{count['sent'] / 1000:,.0f} kB"]
        facts.append(f"{count['parameters']:,}")
        _write_below(inside, 0.5, "center", ["tokens \u2192", "", *facts])
    rows = ["forward", "backward", "both send", "parameters"]
    _write_below(panels[1, 0], -0.03, "right", ["", "", *rows])
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
            box(panel, (token, 2 * head), (1, 2), colour, edgecolor="white")
    panel.set_xlim(-0.2, TOKENS + 0.2)
    panel.set_ylim(2 * HEADS + 0.2, -0.2)
    panel.set_aspect("equal")
    panel.set(xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
