"""From a trace of torch.profiler's to numbers: what of a step is reading data, computing, messages."""

import re


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
    """Return where a rank's time went: the mean of the steps in a trace, and its parts, in ms.

    Args:
        trace: as export_chrome_trace writes it; its steps end with the profiler's step() and have an optimizer's.

    Returns:
        step = data + compute + exposed (messages that are waited for). Messages that are hidden fly while it computes.
    """
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
