"""Who computes when: the timeline of a pipeline's step, as text and as a figure, and the share of time lost waiting."""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

COLUMNS = 88  # of the text
STEPS = 9  # that are watched; the one that takes the median time is shown
Schedule = PipelineScheduleSingle | PipelineScheduleMulti


class Span(NamedTuple):
    """A time in which one worker (a rank, or a device) computes.

    worker: its number, from 0.
    kind: "forward", "backward" (for the inputs, or for all) or "weights" (the backward pass of the weights alone).
    micro_batch: which one, from 0.
    start, end: in seconds since any moment that is the same for all workers.
    """

    worker: int
    kind: str
    micro_batch: int
    start: float
    end: float


def watch(schedule: Schedule, stages: list[PipelineStage], images: Tensor, labels: Tensor) -> list[Span]:
    """Run steps of a pipeline, which leave its weights alone, and note when its stages compute.

    Args:
        schedule: has run no step yet. All ranks must call this together.
        stages: this rank's.
        images, labels: a batch.

    Returns:
        The spans of all ranks, in the step that takes the median time.
    """
    marks, steps, device = [], [], stages[0].device
    inputs, labels = [images.to(device)] if stages[0].is_first else [], labels.to(device)

    def noted(compute, kind, micro_batch, *args, **kwargs):
        start = _moment(device)
        result = compute(micro_batch, *args, **kwargs)
        marks.append((kind, micro_batch, start, _moment(device)))
        return result

    for stage in stages:
        stage.forward_one_chunk = partial(noted, stage.forward_one_chunk, "forward")
        stage.backward_one_chunk = partial(noted, stage.backward_one_chunk, "backward")
        stage.backward_weight_one_chunk = partial(noted, stage.backward_weight_one_chunk, "weights")
    dist.all_gather_object(hosts := [None] * dist.get_world_size(), os.uname().nodename)
    for _ in range(STEPS):
        marks.clear()
        dist.barrier()
        _synchronize(device)
        origin = _moment(device)
        begun = time.perf_counter() if len(set(hosts)) == 1 else 0.0  # nodes have other clocks: count from the barrier
        schedule.step(*inputs, target=labels)
        _synchronize(device)
        steps.append(
            [
                Span(dist.get_rank(), *what, begun + _seconds(origin, start), begun + _seconds(origin, end))
                for *what, start, end in marks
            ]
        )
    dist.all_gather_object(ranks := [None] * dist.get_world_size(), steps)
    return _median([sum(step, []) for step in zip(*ranks, strict=True)])


def watch_modules(step: Callable[[], object], modules: list[nn.Module], device: list[torch.device]) -> list[Span]:
    """Run steps of one process, and note when each module computes, forward and backward.

    Args:
        step: runs all micro-batches of a batch through the modules, then backward.
        modules: the stages; layers in them that come before the first one with weights are not timed in backward.
        device: of each.

    Returns:
        The spans of the step that takes the median time. Worker i is module i.
    """
    marks, steps = [], []

    def mark(worker, kind, micro_batch, border):
        marks.append(((worker, kind, micro_batch), border, _moment(device[worker])))

    def current(worker):  # micro-batches whose forward pass has ended
        return sum(key[:2] == (worker, "forward") and border == "end" for key, border, _ in marks)

    def before(worker, module, inputs):
        mark(worker, "forward", current(worker), "start")

    def after(worker, module, inputs, output):
        micro_batch = current(worker)
        mark(worker, "forward", micro_batch, "end")
        output.register_hook(lambda gradient: mark(worker, "backward", micro_batch, "start"))

    def after_first_layer(worker, layer, inputs, output):
        micro_batch = current(worker)
        output.grad_fn.register_hook(lambda *gradients: mark(worker, "backward", micro_batch, "end"))

    hooks = []
    for worker, module in enumerate(modules):
        first = next(layer for layer in module.modules() if list(layer.parameters(recurse=False)))
        hooks.append(module.register_forward_pre_hook(partial(before, worker)))
        hooks.append(module.register_forward_hook(partial(after, worker)))
        hooks.append(first.register_forward_hook(partial(after_first_layer, worker)))
    for _ in range(STEPS):
        marks.clear()
        for worker in range(len(modules)):
            _synchronize(device[worker])
            mark(worker, "origin", 0, "start")
        step()
        for worker in range(len(modules)):
            _synchronize(device[worker])
        steps.append(_spans(marks))
    for hook in hooks:
        hook.remove()
    return _median(steps)


def _median(steps: list[list[Span]]) -> list[Span]:
    """Return the step that takes the median time. The first two are left out: they also start threads."""
    return sorted(steps[2:], key=duration)[len(steps[2:]) // 2]


def _moment(device: torch.device) -> float | torch.cuda.Event:
    """Return the time, or what notes it when a GPU comes to this point: Python only gives it its work in advance."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(origin: float | torch.cuda.Event, moment: float | torch.cuda.Event) -> float:
    """Return the seconds between two moments of a device that has done all its work."""
    return moment - origin if isinstance(moment, float) else origin.elapsed_time(moment) / 1000


def _synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spans(marks: list[tuple[tuple[str, str, int], str, float | torch.cuda.Event]]) -> list[Span]:
    """Make spans of starts and ends, in seconds since each worker's origin."""
    found = {(key, border): moment for key, border, moment in marks}

    def seconds(key, border):
        return _seconds(found[(key[0], "origin", 0), "start"], found[key, border])

    keys = dict.fromkeys(key for key, _, _ in marks if key[1] != "origin")
    return [Span(*key, seconds(key, "start"), seconds(key, "end")) for key in keys]


def duration(spans: list[Span]) -> float:
    """Return the seconds from the first start to the last end."""
    return max(span.end for span in spans) - min(span.start for span in spans)


def bubble(spans: list[Span], workers: int) -> float:
    """Return the share of the workers' time, 0 to 1, in which they wait.

    Args:
        spans: of one step; those of one worker must not overlap.
        workers: how many there are.
    """
    return 1 - sum(span.end - span.start for span in spans) / (workers * duration(spans))


def as_text(spans: list[Span], names: list[str]) -> str:
    """Return a line for each worker, from the start of the step on the left to its end on the right.

    A digit is the forward pass of that micro-batch (its last digit), a letter the backward pass (a is micro-batch 0), a
    capital the backward pass of the weights alone, and a dot is waiting.

    Args:
        spans: of one step.
        names: of the workers.
    """
    first, column = min(span.start for span in spans), duration(spans) / COLUMNS
    letters = "0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    signs = dict(zip(("forward", "backward", "weights"), letters, strict=True))
    lines = []
    for worker, name in enumerate(names):
        line, most = ["."] * COLUMNS, [column / 2] * COLUMNS  # a column shows what fills more than half of it
        for span in spans:
            start, end = ((moment - first) / column for moment in (span.start, span.end))
            for place in range(int(start), min(int(end) + 1, COLUMNS)) if span.worker == worker else ():
                share = (min(end, place + 1) - max(start, place)) * column
                if share > most[place]:
                    line[place], most[place] = signs[span.kind][span.micro_batch % len(signs[span.kind])], share
        lines.append(f"{name} |{''.join(line)}|")
    return "\n".join(lines)


def show(steps: dict[tuple[str, int], list[Span]], names: list[str], plot: str | None) -> None:
    """Print the timelines of one or two steps and how much faster the first one is, and draw them.

    Args:
        steps: the spans of each, by the name of its schedule and the number of micro-batches.
        names: of the workers.
        plot: path of a figure, or None.
    """
    titles = {}
    for (schedule, pieces), spans in steps.items():
        title = f"{schedule}, {pieces} micro-batch{'es' * (pieces > 1)}: {duration(spans):.4f} s, bubble "
        whose = "GPipe's " if "Interleaved" in schedule else ""  # with two stages on each rank the formula is another
        formula = f"{whose}(p-1)/(m+p-1) = {(len(names) - 1) / (pieces + len(names) - 1):.2f}"
        title += f"{bubble(spans, len(names)):.2f}, {formula}"
        titles[title] = spans
        print(title, as_text(spans, names), sep="\n", flush=True)
    first, *second = map(duration, steps.values())
    if second:
        print(f"the first is {second[0] / first:.2f} times as fast as the second", flush=True)
    if plot:
        draw(titles, names, plot)


def draw(steps: dict[str, list[Span]], names: list[str], path: str) -> None:
    """Draw the steps below each other on one time axis, and write the figure.

    Args:
        steps: the spans of each step, by its title.
        names: of the workers.
        path: of the figure; its ending says the format: .png, .pdf or .svg.
    """
    import matplotlib  # here, because it takes a second

    matplotlib.use("Agg")  # no display needed
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    looks = {
        "forward": {"facecolor": "white"},
        "backward": {"facecolor": "lightgrey", "hatch": "////"},
        "weights": {"facecolor": "grey"},
    }
    height = 0.9 + 0.45 * len(names)
    figure, axes = pyplot.subplots(len(steps), sharex=True, figsize=(9, height * len(steps) + 0.6), squeeze=False)
    longest = max(duration(spans) for spans in steps.values())
    for axis, (title, spans) in zip(axes[:, 0], steps.items(), strict=True):
        first = min(span.start for span in spans)
        for span in spans:
            width = span.end - span.start
            bar = {"left": (span.start - first) * 1000, "width": width * 1000, "edgecolor": "black", "linewidth": 0.6}
            axis.barh(span.worker, height=0.8, **bar, **looks[span.kind])
            if width > longest / 90 * len(str(span.micro_batch)):  # else the number would not fit
                middle = (span.start + width / 2 - first) * 1000
                box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
                axis.text(middle, span.worker, span.micro_batch, ha="center", va="center", fontsize=7, bbox=box)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()  # the first worker on top
        axis.set_title(title, fontsize=9, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("time (ms); the numbers are micro-batches, and where nothing is drawn a worker waits")
    kinds = {span.kind for spans in steps.values() for span in spans}
    patches = [Patch(edgecolor="black", label=kind, **look) for kind, look in looks.items() if kind in kinds]
    figure.legend(handles=patches, loc="upper right", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
