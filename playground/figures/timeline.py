"""What each rank does in which order, and when it is in which call, on CPUs."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple
from unittest import mock

import torch.distributed as dist

METHODS = {  # of a PipelineStage, and what each computes
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}


class Span(NamedTuple):
    """A time in which one rank computes, or is in a call.

    rank: its number.
    kind: what it computes, or a kind of Calls.
    micro_batch: its number, from 0. For a call it is 0.
    start, end: in seconds, or in steps, counted from a moment that is the same for all ranks.
    """

    rank: int
    kind: str
    micro_batch: int
    start: float
    end: float


def note_calls(stage: object, name: str, kind: tuple, marks: list[tuple]) -> None:
    """Make a method of a stage add to the marks what it computes, and the micro-batch."""
    method = getattr(stage, name)

    def noted(micro_batch, *args, **kwargs):
        marks.append((*kind, micro_batch))
        return method(micro_batch, *args, **kwargs)

    setattr(stage, name, noted)


def bubble(spans: list[Span], ranks: int) -> float:
    """Return the part of the ranks' time, 0 to 1, in which they wait.

    Args:
        spans: of one step. The spans of one rank must not overlap.
        ranks: how many there are.
    """
    duration = max(span.end for span in spans) - min(span.start for span in spans)
    computing = sum(span.end - span.start for span in spans)
    return 1 - computing / (ranks * duration)


class Calls:
    """While this is active, it notes when this rank is in which call.

    The calls are time.sleep ("asleep"), dist.send, dist.recv, the wait() of a request, and one
    function that computes ("computing"). All ranks must enter together, because a barrier comes
    first. Times are counted from its end.

    Args:
        computing: this function, or None.
    """

    def __init__(self, computing: Callable | None = None):
        self.spans = []
        self._in_call = False
        self._patches = ExitStack()
        self._computing = computing

    def __enter__(self) -> "Calls":
        """Replace each function by one that also notes when it is called."""
        dist.barrier()
        self._origin = time.perf_counter()
        for kind, place, name in (
            ("asleep", time, "sleep"),
            ("send", dist, "send"),
            ("recv", dist, "recv"),
            ("wait", dist.Work, "wait"),
        ):
            noted = self._noted(kind, getattr(place, name))
            self._patches.enter_context(mock.patch.object(place, name, noted))
        if self._computing:
            # The other functions of its module find it under its name among these.
            names = self._computing.__globals__
            noted = self._noted("computing", self._computing)
            patch = mock.patch.dict(names, {self._computing.__name__: noted})
            self._patches.enter_context(patch)
        return self

    def __exit__(self, *error) -> None:
        """Put the functions back."""
        self._patches.close()

    def _noted(self, kind: str, function: Callable) -> Callable:
        """Return a function that does the same, and adds a span."""

        def noted(*args, **kwargs):
            if self._in_call:  # send and recv wait for a request
                return function(*args, **kwargs)
            self._in_call = True
            start = time.perf_counter() - self._origin
            try:
                return function(*args, **kwargs)
            finally:
                end = time.perf_counter() - self._origin
                self.spans.append(Span(dist.get_rank(), kind, 0, start, end))
                self._in_call = False

        return noted

    def of_all_ranks(self) -> list[Span]:
        """Return the spans of all ranks. All of them must call this together."""
        spans_of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(spans_of_ranks, self.spans)
        return list(chain(*spans_of_ranks))
