"""The timeline of one step of a pipeline: when each rank, or each device, computes and waits.

It is shown as text and as a figure, with the bubble: the share of the time that is lost by waiting.
Calls makes such a timeline of point-to-point messages: when each rank is in which call.
"""

import platform
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:  # importing these takes a second, and most lessons do not need them
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

COLUMNS = 88  # of the text
STEPS = 9  # that are run; the one with the median time is shown
BY_HAND = {"forward": "forward", "backward": "backward"}  # methods, and what each computes
METHODS = {  # the same of a PipelineStage
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "weights",
}
SIGNS = {
    "forward": "0123456789",
    "backward": "abcdefghijklmnopqrstuvwxyz",
    "weights": "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    "asleep": "z",
    "send": "s",
    "recv": "r",
    "wait": "w",
    "computing": "c",
    "all_gather": "g",
    "reduce_scatter": "r",
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


def watch(
    schedule: "PipelineScheduleSingle | PipelineScheduleMulti",
    stages: "list[PipelineStage]",
    images: Tensor,
    labels: Tensor,
) -> list[Span]:
    """Run some steps of a pipeline without an optimizer, and note when its stages compute.

    All ranks have to call this together.

    Args:
        schedule: runs the stages, and has run no step yet.
        stages: those of this rank.
        images, labels: a batch.

    Returns:
        The spans of all ranks in the step that takes the median time.
    """
    device = stages[0].device
    inputs = []
    if stages[0].is_first:
        inputs = [images.to(device)]
    return watch_step(partial(schedule.step, *inputs, target=labels.to(device)), stages, METHODS)


def watch_step(step: Callable, stages: list, methods: dict[str, str] = BY_HAND) -> list[Span]:
    """Run a step of a pipeline some times, and note when its stages compute.

    All ranks have to call this together.

    Args:
        step: runs all micro-batches of a batch, forward and backward.
        stages: those of this rank. Each has a device.
        methods: of a stage that compute, and what each of them computes. Their first argument is
            the number of the micro-batch.

    Returns:
        The spans of all ranks in the step that takes the median time.
    """
    rank = dist.get_rank()
    device = stages[0].device
    one_clock = _on_one_node()
    marks = []
    for stage in stages:
        for name, kind in methods.items():
            index = getattr(stage, "stage_index", 0)  # PipelineStage has it
            note_calls(stage, name, (index, kind), marks)
    steps = []
    for _ in range(STEPS):
        marks.clear()
        dist.barrier()
        _synchronize(device)
        origin = _moment(device)
        # The clocks of two nodes differ. There, each rank counts from the end of the barrier.
        begun = time.perf_counter() if one_clock else 0.0
        step()
        _synchronize(device)
        spans = []
        for (index, kind), micro_batch, start, end in marks:
            start = begun + _seconds(origin, start)
            end = begun + _seconds(origin, end)
            spans.append(Span(rank, kind, micro_batch, start, end, index))
        steps.append(spans)
    for stage in stages:
        for name in methods:
            delattr(stage, name)  # the method of its class is back
    steps_of_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(steps_of_ranks, steps)
    whole_steps = []
    for number in range(STEPS):
        spans = []
        for steps in steps_of_ranks:
            spans += steps[number]
        whole_steps.append(spans)
    return _median(whole_steps)


def _on_one_node() -> bool:
    """Return whether all ranks are on the same node."""
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, platform.node())
    return len(set(hosts)) == 1


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


def watch_modules(
    modules: list[nn.Module], devices: list[torch.device], step: Callable, *args
) -> list[Span]:
    """Run some steps of one process, and note when each module computes, forward and backward.

    Args:
        modules: the stages. The backward pass of the layers before the first one with parameters is
            not timed.
        devices: of each module.
        step: runs all micro-batches of a batch through the modules, and then backward.
        args: of the step.

    Returns:
        The spans of the step that takes the median time. Worker i is module i.
    """
    starts = {}  # the moments, by worker, kind and micro-batch
    ends = {}
    done = [0] * len(modules)  # how many micro-batches each module has computed forward

    def note(moments, worker, kind, micro_batch, *_):
        moments[worker, kind, micro_batch] = _moment(devices[worker])

    def before_module(worker, module, inputs):
        note(starts, worker, "forward", done[worker])

    def after_first_layer(worker, layer, inputs, output):
        # This hook runs when the gradients of the layer have been computed.
        output.grad_fn.register_hook(partial(note, ends, worker, "backward", done[worker]))

    def after_module(worker, module, inputs, output):
        note(ends, worker, "forward", done[worker])
        # This hook runs when the gradient of the output has arrived.
        output.register_hook(partial(note, starts, worker, "backward", done[worker]))
        done[worker] += 1

    hooks = []
    for worker, module in enumerate(modules):
        layers = [layer for layer in module.modules() if list(layer.parameters(recurse=False))]
        hooks.append(module.register_forward_pre_hook(partial(before_module, worker)))
        hooks.append(layers[0].register_forward_hook(partial(after_first_layer, worker)))
        hooks.append(module.register_forward_hook(partial(after_module, worker)))
    steps = []
    for _ in range(STEPS):
        starts.clear()
        ends.clear()
        done[:] = [0] * len(modules)
        origins = []
        for device in devices:
            _synchronize(device)
            origins.append(_moment(device))
        step(*args)
        for device in devices:
            _synchronize(device)
        steps.append(_spans(origins, starts, ends))
    for hook in hooks:
        hook.remove()
    return _median(steps)


def _spans(origins: list[Moment], starts: dict, ends: dict) -> list[Span]:
    """Make spans of the starts and ends, in seconds since the origin of each worker."""
    spans = []
    for (worker, kind, micro_batch), start in starts.items():
        origin = origins[worker]
        end = ends[worker, kind, micro_batch]
        span = Span(worker, kind, micro_batch, _seconds(origin, start), _seconds(origin, end))
        spans.append(span)
    return spans


def _median(steps: list[list[Span]]) -> list[Span]:
    """Return the step with the median time, without the first two, which also start threads."""
    by_time = sorted(steps[2:], key=duration)
    return by_time[len(by_time) // 2]


def _moment(device: torch.device) -> Moment:
    """Return the time; on a GPU, an event that notes when the GPU has done what is queued now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(origin: Moment, moment: Moment) -> float:
    """Return the seconds between two moments of a device whose queue is empty."""
    if isinstance(moment, float):
        return moment - origin
    return origin.elapsed_time(moment) / 1000


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


def most_kept(spans: list[Span], worker: int) -> float:
    """Return of how many micro-batches a worker keeps the activations at most.

    They are kept from the start of the forward pass to the end of the backward pass, or of its
    second part. If a worker has several stages, the activations of each are a fraction.
    """
    starts = {}  # (stage, micro-batch) -> when its forward pass starts
    ends = {}  # and when its last pass ends
    for span in spans:
        if span.worker != worker:
            continue
        key = span.stage, span.micro_batch
        ends[key] = max(span.end, ends.get(key, span.end))
        if span.kind == "forward":
            starts[key] = span.start
    most = 0
    for moment in starts.values():
        kept = [key for key in starts if starts[key] <= moment < ends[key]]
        most = max(most, len(kept))
    return most / len({stage for stage, _ in starts})


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

    def show(self) -> None:
        """Print a line for each rank, on rank 0. All ranks must call this together."""
        spans = self.of_all_ranks()
        if dist.get_rank() == 0:
            names = [f"rank {rank}" for rank in range(dist.get_world_size())]
            print(as_text(spans, names, columns=60), flush=True)


def as_text(spans: list[Span], names: list[str], columns: int = COLUMNS) -> str:
    """Return a line for each worker, from the start of the step on the left to its end.

    A digit is the forward pass of the micro-batch with that number (its last digit). A letter is
    the backward pass (a: micro-batch 0), and a capital letter is the part of it that computes the
    gradients of the parameters. A dot is waiting.

    For calls, the letters are z (asleep), s (in send), r (in recv), w (in wait) and c (computing),
    or g (in all_gather_into_tensor) and r (in reduce_scatter_tensor).

    Args:
        spans: of one step.
        names: of the workers.
        columns: the length of the lines, without names.
    """
    first = min(span.start for span in spans)
    column = duration(spans) / columns
    lines = []
    for worker, name in enumerate(names):
        line = ["."] * columns
        filled = [0.5] * columns  # a column shows what fills more than half of it
        for span in spans:
            if span.worker != worker:
                continue
            signs = SIGNS[span.kind]
            start = (span.start - first) / column
            end = (span.end - first) / column
            for place in range(int(start), min(int(end) + 1, columns)):
                share = min(end, place + 1) - max(start, place)
                if share > filled[place]:
                    filled[place] = share
                    line[place] = signs[span.micro_batch % len(signs)]
        lines.append(f"{name} |{''.join(line)}|")
    return "\n".join(lines)


def show(steps: dict[tuple[str, int], list[Span]], names: list[str], plot: str | None) -> None:
    """Print the timelines of one or two steps and how much faster the first one is, and draw them.

    Args:
        steps: the spans of each step, by the name of its schedule and the number of micro-batches.
        names: of the workers.
        plot: the path of a figure, or None.
    """
    spans_by_title = {}
    for (schedule, micro_batches), spans in steps.items():
        title = _title(schedule, micro_batches, spans, len(names))
        spans_by_title[title] = spans
        print(title, as_text(spans, names), sep="\n", flush=True)
        kept = [f"{most_kept(spans, worker):g}" for worker in range(len(names))]
        print(f"micro-batches whose activations are kept, at most: {', '.join(kept)}", flush=True)
    if len(steps) == 2:
        first, second = map(duration, steps.values())
        print(f"the first is {second / first:.2f} times as fast as the second", flush=True)
    if plot:
        draw(spans_by_title, names, plot)


def _title(schedule: str, micro_batches: int, spans: list[Span], workers: int) -> str:
    """Return the line above a timeline: the schedule, the time, the bubble and its formula."""
    batches = "micro-batch" if micro_batches == 1 else "micro-batches"
    formula = (workers - 1) / (micro_batches + workers - 1)
    # The formula is that of one stage on each rank. These schedules have two.
    whose = "GPipe's " if "Interleaved" in schedule else ""
    return (
        f"{schedule}, {micro_batches} {batches}: {duration(spans):.4f} s,"
        f" bubble {bubble(spans, workers):.2f}, {whose}(p-1)/(m+p-1) = {formula:.2f}"
    )


def draw(steps: dict[str, list[Span]], names: list[str], path: str) -> None:
    """Draw the steps below each other on one time axis, and write the figure.

    Args:
        steps: the spans of each step, by its title.
        names: of the workers.
        path: of the figure. Its suffix says the format: .png, .pdf or .svg.
    """
    # The import is here, because it takes a second.
    from measure.style import BLUE, GREEN, INK, ORANGE, add_legend, new_figure, save

    colours = {"forward": BLUE, "backward": ORANGE, "weights": GREEN}
    height = len(steps) * (0.7 + 0.5 * len(names)) + 0.9
    figure, axes = new_figure(len(steps), 1, height, sharex=True)
    longest = max(duration(spans) for spans in steps.values())
    kinds = set()
    for axis, (title, spans) in zip(axes[:, 0], steps.items(), strict=True):
        first = min(span.start for span in spans)
        for span in spans:
            left = 1000 * (span.start - first)
            width = 1000 * (span.end - span.start)
            look = {"facecolor": colours[span.kind], "edgecolor": INK, "linewidth": 0.6}
            axis.barh(span.worker, width, left=left, height=0.8, **look)
            kinds.add(span.kind)
            room = 1000 * longest / 50 * len(str(span.micro_batch))
            if width > room:
                middle = left + width / 2
                colour = "white" if span.kind == "forward" else INK
                look = {"ha": "center", "va": "center", "color": colour}
                axis.text(middle, span.worker, span.micro_batch, **look)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()  # the first worker is on top
        axis.set_title(title, loc="left")
    axes[-1, 0].set_xlabel("time (ms); the numbers are micro-batches, and a gap means waiting")
    add_legend(figure, {kind: colours[kind] for kind in colours if kind in kinds})
    save(figure, path)
