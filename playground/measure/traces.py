"""A trace of what each rank does: which operation ran when, what was sent meanwhile; and where a step's time went."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

STEPS = 10  # in a trace


def profiled(batches: tqdm, folder: str | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pass the batches on to the training loop, and trace what it does with some of them.

    An epoch's first steps are left out: they also start threads and fill caches. Each epoch replaces the trace of the
    one before. Profiling takes time itself: compare the seconds of runs without it.

    Args:
        batches: of one epoch.
        folder: where to write rank<r>.json, in Chrome's trace format (times in µs); None: don't trace.

    Yields:
        The batches, unchanged.
    """
    if folder is None:
        yield from batches
        return
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler logs its own starts and stops
    schedule = torch.profiler.schedule(wait=0, warmup=min(5, len(batches) // 2), active=STEPS, repeat=1)

    def write(profiler):
        Path(folder).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(f"{folder}/rank{rank}.json")

    with torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler:
        for number, batch in enumerate(batches):
            if number:
                profiler.step()  # reading the next batch counts as the end of a step; after the last there is none
            yield batch


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge spans, (start, end), that overlap. Returns them in order of time."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def minus(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the parts of the spans that none of the others covers, in order of time."""
    left = union(spans)
    for first, last in union(others):
        pieces = [((start, min(end, first)), (max(start, last), end)) for start, end in left]  # before it, after it
        left = [(start, end) for both in pieces for start, end in both if start < end]
    return left


def step_times(trace: dict) -> dict[str, float]:
    """Return a rank's mean step in ms: step = data + compute + exposed. What is hidden is a part of compute."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]

    def spans(sign):
        found = [event for event in events if re.match(sign, f"{event.get('cat')} {event['name']}")]
        return [(event["ts"], event["ts"] + event["dur"]) for event in found]

    updates = spans(r"user_annotation Optimizer\.step")
    steps = spans("user_annotation ProfilerStep")
    steps = [(start, end) for start, end in steps if any(start <= at < end for at, _ in updates)]  # no stump
    loading = spans(r"user_annotation enumerate\(DataLoader\)")
    messages, computing = spans("kernel nccl"), spans("kernel (?!nccl)")
    if not computing:  # a CPU: a rank that waits is inside autograd or c10d, one that works is inside these
        messages, computing = spans("user_annotation gloo:"), spans(r"cpu_op aten::|user_annotation Optimizer\.")
        computing = minus(computing, loading)  # the loader calls aten, too

    def total(spans):
        inside = minus(spans, minus(spans, steps))
        return sum(end - start for start, end in inside) / len(steps) / 1000  # µs of all to ms of one

    step, data, exposed = total(steps), total(minus(loading, computing + messages)), total(minus(messages, computing))
    hidden = total(messages) - exposed
    return {"step": step, "data": data, "compute": step - data - exposed, "exposed": exposed, "hidden": hidden}
