"""When rank 0 computes and when its messages travel, in a step of profile_steps.py with DDP."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from figures.style import BLUE, GREEN, ORANGE, SKY, arrow, box, new_figure, save

LESSON = Path(__file__).resolve().parents[2] / "replicated" / "profile_steps.py"
WIDE = ("--dataset", "digits", "--batch_size", "240", "--width", "1024", "--layers", "5")


def count(flags: tuple[str, ...] = WIDE) -> dict[str, dict[str, list]]:
    """Trace steps of profile_steps.py with DDP: with buckets of 1 MiB, and with a single bucket.

    Args:
        flags: more flags of the lesson.

    Returns:
        For both, the step of rank 0 that takes the median time: "forward", "backward", "optimizer"
        ([start, end]) and "messages" (one [start, end] each), in ms from its start.
    """
    steps = {}
    for name, mebibytes in (("buckets of 1 MiB", 1), ("one bucket", 1000)):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", "2", str(LESSON)]
            command += ["--device", "cpu", "--out", folder, "--bucket_cap_mb", str(mebibytes)]
            subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
            trace = json.loads(Path(folder, "rank0.json").read_text())
        steps_of_trace = _named(trace, "user_annotation ProfilerStep")
        found = [_parts_of_step(trace, *step) for step in steps_of_trace]
        found.sort(key=lambda parts: parts["optimizer"][1])
        steps[name] = found[len(found) // 2]
    return steps


def _named(trace: dict, pattern: str) -> list[tuple[float, float]]:
    """Return the spans of a trace whose category and name, with a space between, match."""
    spans = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue  # it has no duration
        if re.match(pattern, f"{event.get('cat')} {event['name']}"):
            spans.append((event["ts"], event["ts"] + event["dur"]))
    return spans


def _parts_of_step(trace: dict, start: float, end: float) -> dict[str, list]:
    """Return when a step of a trace computes and sends, in ms from its start."""

    def inside(pattern):
        spans = []
        for first, last in sorted(_named(trace, pattern)):
            if start <= first < end:
                spans.append([round((first - start) / 1000, 2), round((last - start) / 1000, 2)])
        return spans

    forward = inside(r"\w+ DistributedDataParallel\.forward")
    backward = inside("cpu_op autograd::engine::evaluate_function")
    optimizer = inside(r"user_annotation Optimizer\.step")
    return {
        "forward": [forward[0][0], backward[0][0]],  # and the loss
        "backward": [backward[0][0], max(last for _, last in backward)],
        "optimizer": optimizer[0],
        "messages": inside("user_annotation gloo:"),
    }


def draw(counts: dict, path: Path) -> None:
    """Draw when rank 0 computes, and when its messages travel, in a step with DDP."""
    colours = {"forward": SKY, "backward": BLUE, "optimizer": GREEN}
    ends = [parts["optimizer"][1] for parts in counts.values()]
    title = f"Messages travel during backward(): a step is {ends[1] - ends[0]:.0f} ms shorter"
    figure, panels = new_figure(title, len(counts), 1, 4.8, sharex=True)
    for panel, (buckets, parts) in zip(panels[:, 0], counts.items(), strict=True):
        for kind, colour in colours.items():
            start, end = parts[kind]
            text = "update" if kind == "optimizer" else kind
            box(panel, (start, 1.1), (end - start, 0.8), colour, text, fontsize=10)
        # Messages may travel at the same time, so each one has a row of its own.
        count_of_messages = len(parts["messages"])
        height = 0.8 / count_of_messages
        for number, (start, end) in enumerate(parts["messages"]):
            corner = (start, 0.9 - (number + 1) * height)
            box(panel, corner, (end - start, height), ORANGE)
        computed = parts["backward"][1]
        waited = parts["optimizer"][0]
        arrow(panel, (waited, 1.5), (computed, 1.5), arrowstyle="<->")
        middle = (computed + waited) / 2
        panel.text(middle, 1.6, f"waits {waited - computed:.0f} ms", ha="center", va="bottom")
        panel.set_yticks([1.5, 0.5], ["computing", "messages"])
        panel.set_ylim(0, 2.1)
        panel.set_title(f"{buckets}: {parts['optimizer'][1]:.0f} ms", loc="left")
    panel.set_xlim(0, 1.02 * max(ends))
    panel.set_xlabel("ms of a step of rank 0")
    save(figure, path)
