"""In which order each rank computes, in a step of four schedules of pipeline_parallel.py.

Its numbers have a text for each rank, in PyTorch's own notation: "4F0" is the forward pass of
micro-batch 0 in stage 4. B is a backward pass. If it is split, I computes the gradient of the
input, and W computes those of the parameters.
"""

import re
from pathlib import Path
from typing import NamedTuple

from matplotlib.ticker import MultipleLocator

from figures.style import (
    BLUE,
    GREEN,
    PALE_GREEN,
    PALE_PINK,
    PALE_VERMILLION,
    PINK,
    SKY,
    VERMILLION,
    add_legend,
    box,
    new_figure,
    save,
)

RANKS = 4
NEW = {  # in a schedule
    "GPipe": "",
    "1F1B": " (keeps fewer activations)",
    "Interleaved1F1B": " (two stages on a rank)",
    "InterleavedZeroBubble": " (backward in two parts)",
}


class Span(NamedTuple):
    """A time in which one rank computes.

    rank: its number.
    kind: what it computes.
    micro_batch: its number, from 0.
    start, end: in logical time, which is the same for all ranks.
    """

    rank: int
    kind: str
    micro_batch: int
    start: float
    end: float


def bubble(spans: list[Span], ranks: int) -> float:
    """Return the part of the ranks' time, 0 to 1, in which they wait.

    Args:
        spans: of one step. The spans of one rank must not overlap.
        ranks: how many there are.
    """
    duration = max(span.end for span in spans) - min(span.start for span in spans)
    computing = sum(span.end - span.start for span in spans)
    return 1 - computing / (ranks * duration)


def stages_on_a_rank(orders: list[str]) -> int:
    """Return how many stages each rank has."""
    stages = set()
    for order in orders:
        stages |= set(re.findall(r"(\d+)F", order))
    return len(stages) // len(orders)


def logical_time(orders: list[str], stages_per_rank: int) -> list[Span]:
    """Return when each rank computes what, if messages took no time.

    The forward pass of all layers of a rank takes 1, and their backward pass 2. If a backward pass
    is split in two, each part takes 1.

    Args:
        orders: of each rank.
        stages_per_rank: how many stages the layers of a rank are.

    Returns:
        Spans. Their kind is "F0" for the forward pass of a rank's first stage, "I1" for the
        gradient of the input of its second stage, and so on.
    """
    ranks = len(orders)
    last_stage = ranks * stages_per_rank - 1
    lengths = {"F": 1, "B": 2, "I": 1, "W": 1}
    waiting = [order.split() for order in orders]
    free = [0.0] * ranks  # when each rank has done what it has begun
    ends = {}  # of what the next stage, or the stage before, needs
    spans = []
    while any(waiting):
        count_before = len(spans)
        for rank, words in enumerate(waiting):
            while words:
                number, letter, micro_batch = re.match(r"(\d+)(\w)(\d+)", words[0]).groups()
                stage = int(number)
                needed = None
                if letter == "F" and stage > 0:
                    needed = ("forward", stage - 1, micro_batch)
                if letter in "BI" and stage < last_stage:
                    needed = ("backward", stage + 1, micro_batch)
                if needed and needed not in ends:
                    break
                start = max(free[rank], ends.get(needed, 0.0))
                end = start + lengths[letter] / stages_per_rank
                free[rank] = end
                if letter == "F":
                    ends["forward", stage, micro_batch] = end
                if letter in "BI":
                    ends["backward", stage, micro_batch] = end
                spans.append(Span(rank, f"{letter}{stage // ranks}", int(micro_batch), start, end))
                words.pop(0)
        assert len(spans) > count_before, "all ranks wait for each other"
    return spans


def draw(counts: dict, path: Path) -> None:
    """Draw the counted order of each schedule on logical time."""
    colours = {  # for the first stage of a rank, and for its second one
        "F": (BLUE, SKY),
        "B": (VERMILLION, PALE_VERMILLION),
        "I": (PINK, PALE_PINK),
        "W": (GREEN, PALE_GREEN),
    }
    waiting = {}
    spans_of = {}
    for schedule, orders in counts.items():
        spans_of[schedule] = logical_time(orders, stages_on_a_rank(orders))
        waiting[schedule] = bubble(spans_of[schedule], RANKS)
    least = min(waiting.values())
    first = waiting["GPipe"]
    title = f"Ranks wait (the bubble) {first:.0%} of a step with GPipe, {least:.0%} at best"
    figure, panels = new_figure(title, len(counts), 1, 8, sharex=True)
    for panel, (schedule, spans) in zip(panels[:, 0], spans_of.items(), strict=True):
        for span in sorted(spans, key=lambda each: each.kind):
            letter, stage = span.kind
            width = span.end - span.start
            corner = (span.start, RANKS - 1 - span.rank)
            colour = colours[letter][int(stage)]
            box(panel, corner, (width, 0.85), colour, span.micro_batch, fontsize=10)
        panel.set_yticks([3.4, 2.4, 1.4, 0.4], [f"rank {rank}" for rank in range(RANKS)])
        panel.set_ylim(-0.1, RANKS)
        panel.set_title(f"{schedule}{NEW[schedule]}: {waiting[schedule]:.0%} waiting", loc="left")
        panel.margins(x=0.01)
    panel.xaxis.set_major_locator(MultipleLocator(5))
    panel.set_xlabel("time (1: a rank's forward pass); in the boxes: the number of the micro-batch")
    names = {"forward": BLUE, "backward": VERMILLION, "paler: the second stage": PALE_VERMILLION}
    names |= {"backward, activations only": PINK, "backward, parameters only": GREEN}
    add_legend(figure, names, columns=2)
    save(figure, path)
