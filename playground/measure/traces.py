"""Numbers from a trace of torch.profiler: what of a step is reading data, computing, messages."""

import re

Span = tuple[float, float]  # when something started, and when it ended


def union(spans: list[Span]) -> list[Span]:
    """Merge spans that overlap. Returns them in order of time."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def minus(spans: list[Span], others: list[Span]) -> list[Span]:
    """Return the parts of the spans that none of the others covers, in order of time."""
    left = union(spans)
    for first, last in union(others):
        parts = []
        for start, end in left:
            if start < first:
                parts.append((start, min(end, first)))  # the part before the other span
            if last < end:
                parts.append((max(start, last), end))  # the part after it
        left = parts
    return left


def named(trace: dict, pattern: str) -> list[Span]:
    """Return the spans of a trace whose category and name, with a space between, match."""
    spans = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue  # it has no duration
        if re.match(pattern, f"{event.get('cat')} {event['name']}"):
            spans.append((event["ts"], event["ts"] + event["dur"]))
    return spans


def whole_steps(trace: dict) -> list[Span]:
    """Return the steps of a trace, without a last one that has no update of the parameters."""
    updates = named(trace, r"user_annotation Optimizer\.step")
    steps = []
    for start, end in named(trace, "user_annotation ProfilerStep"):
        if any(start <= update < end for update, _ in updates):
            steps.append((start, end))
    return steps


def step_times(trace: dict) -> dict[str, float]:
    """Return where a rank's time went: the mean of the steps in a trace and of their parts, in ms.

    Args:
        trace: as export_chrome_trace writes it. The loop called the profiler's step() at the end
            of each step, after the step of an optimizer.

    Returns:
        "step" is the sum of "data", "compute" and "exposed", the messages that are waited for.
        "hidden" are messages that travel while the rank computes.
    """
    steps = whole_steps(trace)
    loading = named(trace, r"user_annotation enumerate\(DataLoader\)")
    messages = named(trace, "kernel nccl")
    computing = named(trace, "kernel (?!nccl)")
    if not computing:  # there is no GPU
        messages = named(trace, "user_annotation gloo:")
        # A rank that waits is inside autograd or c10d. A rank that computes is inside these.
        computing = named(trace, r"cpu_op aten::|user_annotation Optimizer\.")
        computing = minus(computing, loading)  # the loader calls aten, too

    def mean(spans):
        outside = minus(spans, steps)
        inside = minus(spans, outside)
        microseconds = sum(end - start for start, end in inside)
        return microseconds / len(steps) / 1000

    step = mean(steps)
    data = mean(minus(loading, computing + messages))
    exposed = mean(minus(messages, computing))
    return {
        "step": step,
        "data": data,
        "compute": step - data - exposed,
        "exposed": exposed,
        "hidden": mean(messages) - exposed,
    }
