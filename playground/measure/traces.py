"""Times in a trace of torch.profiler: finding them, and computing with them."""

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


def mean_ms(spans: list[Span], steps: list[Span]) -> float:
    """Return how many milliseconds of a step the spans cover, on average over the steps."""
    inside = minus(spans, minus(spans, steps))
    microseconds = sum(end - start for start, end in inside)
    return microseconds / len(steps) / 1000
