"""What compare.py prints: a table for each part, and sentences about its numbers."""

import argparse
import textwrap

from figures.processes import cores

# How far apart two losses may be. The last decimal may be rounded up or down.
APART = 1.01e-4  # in float32, because it is printed with four decimals
APART_DOUBLE = 1e-10  # in float64, which is printed with twelve


def table(title: str, rows: list, columns: dict[str, str]) -> None:
    """Print a Markdown table with a row for each run. A note says why a run has failed.

    Args:
        title: is printed above the table.
        rows: the Runs, or a dict for each row. What a run has not reported is shown as a dash.
        columns: the format of each column, such as "{loss:.4f}", by its head.
    """
    columns = columns | {"note": "{note}"}
    cells = [list(columns)]
    for row in rows:
        values = row if isinstance(row, dict) else vars(row)
        cells.append([_cell(text, values) for text in columns.values()])
    widths = []
    for column in zip(*cells, strict=True):
        widths.append(max(map(len, column)))
    widths[-1] = 4  # of the notes, which may be long
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n## {title}\n")
    for row in cells:
        texts = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        texts[0] = row[0].ljust(widths[0])
        texts[-1] = row[-1].ljust(widths[-1])
        print("|", " | ".join(texts), "|")
    print()


def _cell(text: str, row: dict) -> str:
    """Return a cell of a table, without the sign between cells."""
    try:
        return text.format(**row).replace("|", "/")
    except (KeyError, TypeError):
        return "–"


def say(*sentences: str) -> None:
    """Print sentences as one paragraph."""
    print(textwrap.fill(" ".join(sentences), 100))


def tell_parity(runs: list) -> None:
    """Say whether all lessons print the same numbers."""
    columns = {
        "lesson": "{name}",
        "loss": "{loss:.4f}",
        "train": "{train:.2f}%",
        "test": "{test:.2f}%",
        "loss, float64": "{loss_float64:.12f}",
        "differs by": "{difference:.0g}",
    }
    table("Parity: the last epoch", runs, columns)
    good = [run for run in runs if not run.failed]
    if len(good) < 2 or good[0].lesson != "single_gpu":
        say("There are no two lessons to compare.")
        return
    one, *others = good
    alike = [run for run in others if abs(run.loss - one.loss) < APART]
    say(f"In float32, {len(alike)} of {len(others)} end with the loss of single_gpu.py.")
    differences = [run.difference for run in others if run.difference is not None]
    if not differences:
        return
    largest = max(differences)
    if largest < APART_DOUBLE:
        say(
            f"In float64, the losses of each epoch differ by at most {largest:.0g}, so only",
            "rounding differs.",
        )
    else:
        say(
            f"In float64, a loss differs by {largest:.0g}. This is more than rounding, so a lesson",
            "computes something else.",
        )


def tell_speed(runs: list, args: argparse.Namespace) -> None:
    """Say what the same runs cost."""
    columns = {
        "lesson": "{name}",
        "images/s": "{images_per_s:,.0f}",
        "start-up s": "{start_up_s:.1f}",
        "peak memory MiB": "{memory_mib:,.0f}",
    }
    if any(run.gpu_memory_mib is not None for run in runs):
        columns["on a GPU MiB"] = "{gpu_memory_mib:,.0f}"
    table("Speed, start-up, memory", runs, columns)
    good = {run.lesson: run for run in runs if not run.failed}
    if "single_gpu" not in good or "distributed_data_parallel" not in good:
        return
    one = good["single_gpu"]
    ddp = good["distributed_data_parallel"]
    faster = ddp.images_per_s / one.images_per_s
    before = 1000 * args.batch_size / one.images_per_s
    after = 1000 * args.batch_size / ddp.images_per_s
    later = ddp.start_up_s - one.start_up_s
    larger = ddp.memory_mib / one.memory_mib
    say(
        f"With DDP, {args.gpus} processes train {faster:.2f} times as fast as one process:",
        f"a step takes {after:.1f} ms instead of {before:.1f} ms.",
    )
    if faster < 1:
        say("Averaging the gradients costs more time than dividing the batch saves.")
    say(
        f"They start {later:.1f} s later, because the ranks import torch after the command has.",
        f"The largest process needs {larger:.2f} times the memory of one process. Each process has",
        "the whole model and all of the data.",
    )


def tell_scaling(runs: list, args: argparse.Namespace) -> None:
    """Say what more processes gain, with the same global batch and with the same per-rank batch."""
    columns = {
        "lesson": "{name}",
        "scaling": "{kind}",
        "images/s": "{images_per_s:,.0f}",
        "speed-up": "{speed_up:.2f}",
        "efficiency": "{efficiency:.0%}",
    }
    table("Scaling", runs, columns)
    if args.device == "cpu" and cores() == 1:
        say("This machine has one core, so more processes cannot be faster than one.")
    for kind, batch in (("strong", "global batch"), ("weak", "per-rank batch")):
        known = []
        for run in runs:
            if run.kind == kind and run.processes > 1 and run.speed_up:
                known.append(run)
        if known:
            best = max(known, key=lambda run: run.speed_up)
            say(
                f"With the same {batch}, {best.processes} processes are {best.speed_up:.2f}",
                f"times as fast as one process. This is {best.efficiency:.0%} of the ideal.",
            )
    say(
        "The messages of a step are equally long in both cases. A smaller per-rank batch leaves",
        "less to compute between them.",
    )


def tell_steps(runs: list, args: argparse.Namespace) -> None:
    """Say where the time of a step goes."""
    columns = {
        "ms of a step of": "{name}",
        "step": "{step:.2f}",
        "data": "{data:.2f}",
        "computing": "{compute:.2f}",
        "messages": "{waiting:.2f}",
        "hidden": "{hidden:.2f}",
    }
    table("Where the time of a step goes", runs, columns)
    say(
        "step = data + computing + messages. Hidden messages travel while the rank computes.",
        "A traced step takes longer than others.",
    )
    for run in runs:
        if run.failed:
            continue
        waiting = run.waiting / run.step
        hidden = run.hidden / max(run.hidden + run.waiting, 1e-9)
        say(
            f"{run.name} waits for messages for {waiting:.0%} of its time,",
            f"and {hidden:.0%} of its messages are hidden.",
        )
        if "ddp" in run.words and hidden < 0.05:
            say(
                "DDP sends a bucket while backward() still computes. But a small model has only",
                "one bucket, which is full at the end.",
            )


def tell_widths(rows: list[dict], args: argparse.Namespace) -> None:
    """Say from which width on several processes are faster than one."""
    columns = {
        "width": "{width}",
        "1 process, images/s": "{one:,.0f}",
        f"DDP, {args.gpus}, images/s": "{several:,.0f}",
        "waits for messages": "{messages:.0%}",
    }
    table("Width of the layers", rows, columns)
    known = [row for row in rows if row["one"] and row["several"]]
    faster = [row["several"] > row["one"] for row in known]
    if True not in faster:
        where = "with none of these widths"
    elif faster[0]:
        where = f"already with the smallest width, {known[0]['width']}"
    else:
        first = faster.index(True)
        where = f"between the widths {known[first - 1]['width']} and {known[first]['width']}"
    say(
        f"DDP starts to be faster than one process {where}. Computing and messages both grow",
        "with the square of the width. But each message also costs a time that does not depend on",
        "its length.",
    )
    shares = [row["messages"] for row in rows if row["messages"] is not None]
    if len(shares) > 1:
        say(f"The share of messages in a step goes from {shares[0]:.0%} to {shares[-1]:.0%}.")
