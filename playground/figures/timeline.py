"""The timeline of one step: when each rank computes and waits, or is in which call."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

METHODS = {  # of a PipelineStage, and what each computes
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}
CPU = torch.device("cpu")
Moment = float | torch.cuda.Event


class Span(NamedTuple):
    """A time in which one worker (a rank, or a device) computes, or is in a call.

    worker: its number, from 0.
    kind: "forward", "backward" (for the inputs, or for all) or "weights" (for the parameters only).
        For a call it is a kind of Calls.
    micro_batch: its number, from 0. For a call it is 0.
    start, end: in seconds, counted from a moment that is the same for all workers.
    stage: its number, if a worker has several.
    """

    worker: int
    kind: str
    micro_batch: int
    start: float
    end: float
    stage: int = 0


def note_calls(stage: object, name: str, kind: str, marks: list[tuple]) -> None:
    """Make a method of a stage add to the marks: kind, micro-batch, and when it computes.

    If the method first receives something, it computes from the end of dist.recv on.
    """
    method = getattr(stage, name)
    receive = dist.recv

    def noted(micro_batch, *args, **kwargs):
        starts = [_moment(stage.device)]

        def received(*args, **kwargs):
            source = receive(*args, **kwargs)
            starts.append(_moment(stage.device))
            return source

        with mock.patch.object(dist, "recv", received):
            result = method(micro_batch, *args, **kwargs)
        marks.append((kind, micro_batch, starts[-1], _moment(stage.device)))
        return result

    setattr(stage, name, noted)


def _moment(device: torch.device) -> Moment:
    """Return the time; on a GPU, an event that notes when the GPU has done what is queued now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def duration(spans: list[Span]) -> float:
    """Return the seconds from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: list[Span], workers: int) -> float:
    """Return the share of the workers' time, 0 to 1, in which they wait.

    Args:
        spans: of one step. The spans of one worker must not overlap.
        workers: how many there are.
    """
    computing = sum(span.end - span.start for span in spans)
    return 1 - computing / (workers * duration(spans))


class Calls:
    """While this is active, it notes when this rank is in which call.

    The calls are time.sleep ("asleep"), dist.send, dist.recv, the wait() of a request, one function
    that computes ("computing"), dist.all_gather_into_tensor and dist.reduce_scatter_tensor. All
    ranks must enter together, because a barrier comes first. Times are counted from the end of the
    barrier, because the clocks of two nodes differ. A GPU runs its calls later, so the two
    collectives wait for it before and after.

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
            ("all_gather", dist, "all_gather_into_tensor"),
            ("reduce_scatter", dist, "reduce_scatter_tensor"),
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
            device = args[0].device if kind in ("all_gather", "reduce_scatter") else CPU
            _synchronize(device)
            start = time.perf_counter() - self._origin
            try:
                return function(*args, **kwargs)
            finally:
                _synchronize(device)
                end = time.perf_counter() - self._origin
                self.spans.append(Span(dist.get_rank(), kind, 0, start, end))
                self._in_call = False

        return noted

    def of_all_ranks(self) -> list[Span]:
        """Return the spans of all ranks. All of them must call this together."""
        spans_of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(spans_of_ranks, self.spans)
        return list(chain(*spans_of_ranks))
