"""Finding times in a trace of torch.profiler."""

import re

Span = tuple[float, float]  # when something started, and when it ended


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
