"""Who waits for whom in the exchanges of both point-to-point lessons."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import blocking_p2p
import nonblocking_p2p
import torch
import torch.distributed as dist

from figures.counting import of_all_ranks
from figures.style import BLUE, GREY, ORANGE, box, new_figure, save

RANKS = 2
CALLS = {  # the kinds of calls that are noted
    "asleep": (time, "sleep"),
    "send": (dist, "send"),
    "recv": (dist, "recv"),
    "wait": (dist.Work, "wait"),
    "computing": (nonblocking_p2p, "compute"),
}


def count() -> dict[str, list[list]]:
    """Note when two ranks are in which call, in exchanges of both point-to-point lessons.

    Returns:
        For each exchange a list of [rank, kind of the call, start, end], in seconds.
    """
    rank = dist.get_rank()
    other = 1 - rank
    exchanges = {}
    for late in (None, 0, 1):
        spans = noted_calls(one_rank_is_late, late, blocking_p2p.relay, rank, torch.device("cpu"))
        if late is not None:  # the first time connects the ranks
            exchanges[f"rank {late} is late"] = spans
    for exchange in (nonblocking_p2p.blocking, nonblocking_p2p.nonblocking):
        arguments = (exchange, torch.zeros(2), torch.zeros(2), other, other)
        exchanges[exchange.__name__] = noted_calls(rank_0_is_late, *arguments)
    rows = {}
    for name, spans in exchanges.items():
        rows[name] = sorted(chain(*of_all_ranks(spans)))
    return rows


def one_rank_is_late(late: int | None, exchange: Callable, *args: Any) -> None:
    """Let a rank sleep for a second before an exchange."""
    if dist.get_rank() == late:
        time.sleep(1)
    exchange(*args)


def rank_0_is_late(exchange: Callable, *args: Any) -> None:
    """Let rank 0 sleep before an exchange."""
    if dist.get_rank() == 0:
        time.sleep(0.5)
    exchange(*args)


def noted_calls(function: Callable, *args: Any) -> list[list]:
    """Call a function on all ranks, and note when this rank is in one of the CALLS.

    Returns:
        a list of [rank, kind, start, end], in seconds after a barrier.
    """
    spans = []
    dist.barrier()
    origin = time.perf_counter()
    with ExitStack() as patches:
        for kind, (place, name) in CALLS.items():
            noted = _noted(getattr(place, name), kind, spans, origin)
            patches.enter_context(mock.patch.object(place, name, noted))
        function(*args)
    return spans


def _noted(function: Callable, kind: str, spans: list[list], origin: float) -> Callable:
    """Return a function that does the same, and adds a span."""

    def noted(*args, **kwargs):
        place = len(spans)
        start = time.perf_counter() - origin
        try:
            return function(*args, **kwargs)
        finally:
            del spans[place:]  # send and recv wait for a request, which is no call of the lesson
            end = time.perf_counter() - origin
            spans.append([dist.get_rank(), kind, round(start, 6), round(end, 6)])

    return noted


def draw(counts: dict, path: Path) -> None:
    """Draw in which call each of two ranks is, in four exchanges."""
    titles = {
        "rank 0 is late": "rank 0 sends, rank 1 receives; rank 0 starts late",
        "rank 1 is late": "rank 0 sends, rank 1 receives; rank 1 starts late",
        "blocking": "both send and receive, and then compute",
        "nonblocking": "both compute between isend, irecv and wait()",
    }
    colours = {"asleep": GREY, "computing": BLUE, "send": ORANGE, "recv": ORANGE, "wait": ORANGE}
    texts = {"asleep": "asleep", "computing": "computes"}
    texts |= {"send": "waits in send", "recv": "waits in recv", "wait": "waits in wait"}
    title = "The rank that comes first waits, unless it computes"
    figure, panels = new_figure(title, 4, 1, 6.4, sharex=True)
    for panel, (name, title) in zip(panels[:, 0], titles.items(), strict=True):
        for rank, kind, start, end in counts[name]:
            text = texts[kind] if end - start > 0.15 else ""  # seconds
            box(panel, (start, 0.6 - rank), (end - start, 0.8), colours[kind], text)
        panel.set_yticks([1, 0], ["rank 0", "rank 1"])
        panel.set_ylim(-0.5, 1.5)
        panel.set_title(title, loc="left")
    last_end = max(end for _, _, _, end in chain(*counts.values()))
    panels[-1, 0].set_xlim(0, 1.02 * last_end)
    panels[-1, 0].set_xlabel("seconds")
    save(figure, path)
