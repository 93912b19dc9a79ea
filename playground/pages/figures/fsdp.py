"""Which layers are whole on a rank while each layer computes, with FSDP."""

import argparse
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fully_sharded_data_parallel
from torch import nn
from torch.distributed.tensor import DTensor

from common.models import MLP
from figures.counting import WIDTH, forward_and_backward, in_memory, random_batch
from figures.style import BLUE, GREY, ORANGE, add_legend, box, new_figure, save
from watching.messages import Messages

RANKS = 4


def count() -> dict:
    """Note which of eight layers are whole on a rank while each of them computes.

    Returns:
        "layers": the bytes of each layer's parameters, the first one first.
        "freed" and "kept" (with --keep_weights): a dict for each time at which a layer computes:
            "direction" ("forward" or "backward"), "computes" (the number of the layer, from 1),
            "whole" (the layers whose parameters are whole) and "buffer" (the bytes in which
            parameters arrive).
    """
    counts = {}
    for name, keep_weights in (("freed", False), ("kept", True)):
        model = MLP(WIDTH, layers=7)
        layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
        counts["layers"] = []
        for layer in layers:
            counts["layers"].append(sum(parameter.nbytes for parameter in layer.parameters()))
        shard(model, keep_weights)
        batch = random_batch(8)
        forward_and_backward(model, *batch)  # the first step gathers more
        counts[name] = _watch_layers(layers, partial(forward_and_backward, model, *batch))
    return counts


def shard(model, keep_weights):
    """Call shard() of fully_sharded_data_parallel.py."""
    flags = argparse.Namespace(device="cpu", keep_weights=keep_weights, timeout=60)
    fully_sharded_data_parallel.shard(model, flags)


class Gathered(Messages):
    """Knows what the all_gathers of this rank have in memory."""

    def __init__(self):
        super().__init__()
        self._outputs = []  # weak references, which do not keep memory from being freed

    def note(self, kind: str, operation: Any, args: tuple) -> None:
        """Note the output of an all_gather."""
        if kind == "all_gather":
            self._outputs.append(weakref.ref(args[0].untyped_storage()))

    def gathered(self) -> int:
        """Return the bytes of gathered tensors that are in memory now."""
        return sum(in_memory(self._outputs).values())


def _watch_layers(layers: list[nn.Module], step: Callable) -> list[dict]:
    """Run a step, and note what is whole while each layer computes."""
    moments = []
    gathered = Gathered()

    def note(direction, number, *_):
        whole = []
        for other, layer in enumerate(layers, start=1):
            # A parameter is a DTensor, of which this rank has a shard, unless it is gathered.
            if not isinstance(layer.weight, DTensor):
                whole.append(other)
        moment = {"direction": direction, "computes": number, "whole": whole}
        moments.append(moment | {"buffer": gathered.gathered()})

    def note_later(number, layer, inputs, output):
        output.register_hook(partial(note, "backward", number))

    # These hooks come after those of FSDP: the layer is gathered when they run.
    for number, layer in enumerate(layers, start=1):
        layer.register_forward_pre_hook(partial(note, "forward", number))
        layer.register_forward_hook(partial(note_later, number))
    with gathered:
        step()
    return moments


def draw(counts: dict, path: Path) -> None:
    """Draw a column for each time at which a layer computes, and in it what is whole then."""
    sizes = counts["layers"]
    layers = len(sizes)
    title = f"With FSDP, a rank has one of {layers} layers whole at a time"
    figure, panels = new_figure(title, 2, 1, 7.6)
    titles = {"freed": "FSDP", "kept": "FSDP with --keep_weights"}
    for panel, (name, title) in zip(panels[:, 0], titles.items(), strict=True):
        most = 0
        for place, moment in enumerate(counts[name]):
            x = place if moment["direction"] == "forward" else place + 0.6
            for layer in range(1, layers + 1):
                colour = BLUE if layer in moment["whole"] else "none"
                box(panel, (x - 0.5, -layer - 0.5), (1, 1), colour, edgecolor=GREY)
            colour = ORANGE if moment["buffer"] else "none"
            box(panel, (x - 0.5, -layers - 1.7), (1, 1), colour, edgecolor=GREY)
            together = moment["buffer"] + sum(sizes[layer - 1] for layer in moment["whole"])
            most = max(most, together)
            look = {"ha": "center", "va": "center", "fontsize": 10}
            panel.text(x, -layers - 2.4, f"{together / 1e6:.1f}", **look)
            panel.text(x, -layers - 3.4, moment["computes"], **look)
        panel.set_xticks([])
        rows = [f"layer {layer}" for layer in range(1, layers + 1)]
        rows += ["buffer", "together, MB", "computing: layer"]
        places = [-layer for layer in range(1, layers + 1)]
        places += [-layers - 1.2, -layers - 2.4, -layers - 3.4]
        panel.set_yticks(places, rows, fontsize=11)
        panel.tick_params(length=0)
        panel.set_xlim(-0.6, x + 0.6)
        panel.set_ylim(-layers - 5.1, -0.4)
        panel.spines[:].set_visible(False)
        panel.set_title(f"{title}: together at most {most / 1e6:.1f} MB", loc="left")
        for half, text in ((0, "forward pass"), (layers + 0.6, "backward pass")):
            panel.text(half + (layers - 1) / 2, -layers - 4.4, text, ha="center", va="center")
    add_legend(figure, {"layer is whole": BLUE, "buffer in which a layer arrives": ORANGE})
    save(figure, path)
