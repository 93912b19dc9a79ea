"""What compare.py prints: a table for each part, and sentences that its numbers lead to."""

import argparse
import os
import textwrap


def table(title: str, rows: list[dict], columns: dict[str, str]) -> None:
    """Print runs as a Markdown table of title: format. What a run has not reported is a dash; its note says why."""

    def cell(text, row):
        try:
            return text.format(**row)
        except (KeyError, TypeError):
            return "–"

    columns = columns | {"note": "{note}"}
    cells = [[cell(text, {"note": ""} | row).replace("|", "/") for text in columns.values()] for row in rows]
    cells.insert(0, list(columns))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[-1] = 4  # notes may be long
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n## {title}\n")
    for row in cells:
        first, *numbers, note = [text.rjust(width) for text, width in zip(row, widths, strict=True)]
        print("|", " | ".join([first.strip().ljust(widths[0]), *numbers, note.strip().ljust(4)]), "|")
    print()


def say(*sentences: str) -> None:
    """Print sentences as one paragraph."""
    print(textwrap.fill(" ".join(filter(None, sentences)), 110))


def tell_parity(runs: list[dict], args: argparse.Namespace) -> None:
    """Say whether all lessons arrive at the same numbers."""
    one, *others = [run for run in runs if not run["failed"]] or [{"lesson": None}]
    columns = {"lesson": "{name}", "loss": "{loss:.4f}", "train": "{train:.2f}%", "test": "{test:.2f}%"}
    differences = {
        "weights differ by, float32": "{difference_float32:.0e}",
        "float64, 1 epoch": "{difference_float64:.0e}",
    }
    table("Parity: the last epoch", runs, columns | differences)
    if one["lesson"] != "single_gpu" or not others:
        return say("There are no two lessons to compare.")
    alike = [run for run in others if abs(run["loss"] - one["loss"]) < 1.01e-4]  # one more: it may round up or down
    say(
        f"{len(alike)} of {len(others)} end with single_gpu.py's loss;",
        f"weights differ by up to {max(run['difference_float32'] for run in others):.0e}:",
        f"sums that were rounded in another order, amplified over {args.epochs} epochs.",
    )
    doubles = [run["difference_float64"] for run in others if "difference_float64" in run]
    if doubles and max(doubles) < 1e-10:
        say(f"In float64 that is {max(doubles):.0e}: parallelism changes the speed and the rounding, nothing else.")
    elif doubles:
        say(f"In float64 it is {max(doubles):.0e}: more than rounding, so a lesson does something else.")


def tell_speed(runs: list[dict], args: argparse.Namespace) -> None:
    """Say what the same runs cost."""
    good = {run["lesson"]: run for run in runs if not run["failed"]}
    columns = {"lesson": "{name}", "images/s": "{images_per_s:,.0f}", "start-up s": "{start_up_s:.1f}"}
    columns |= {"peak memory MiB": "{memory_mib:,.0f}", "messages": "{messages}"}
    table("Speed, start-up, memory", runs, columns)
    one, ddp = good.get("single_gpu"), good.get("distributed_data_parallel")
    if one and ddp:
        faster, later = ddp["images_per_s"] / one["images_per_s"], ddp["start_up_s"] - one["start_up_s"]
        larger = ddp["memory_mib"] / one["memory_mib"]
        before, after = (1000 * args.batch_size / run["images_per_s"] for run in (one, ddp))
        say(
            f"With DDP {args.gpus} processes train {faster:.2f} times as fast as one:",
            f"a step takes {after:.1f} ms in place of {before:.1f}.",
            "Averaging the gradients costs more than sharing the work saves." * (faster < 1),
            f"They start {later:.1f} s later, as the ranks import torch after the command has.",
            f"The largest process needs {larger:.2f} times the memory: each has a whole model and all of the data.",
        )


def tell_scaling(runs: list[dict], args: argparse.Namespace) -> None:
    """Say what more processes bring, with the same batch for all together and with the same batch for each."""
    good = [run for run in runs if not run["failed"]]
    columns = {"lesson": "{name}", "scaling": "{kind}", "images/s": "{images_per_s:,.0f}"}
    table("Scaling", runs, columns | {"speed-up": "{speed_up:.2f}", "efficiency": "{efficiency:.0%}"})
    if args.device == "cpu" and len(os.sched_getaffinity(0)) == 1:
        say("This machine has one core: nothing can get faster here, the processes take turns.")
    for kind, batch in (("strong", "the same batch for all together"), ("weak", "the same batch for each")):
        known = [run for run in good if run["kind"] == kind and run["processes"] > 1 and "speed_up" in run]
        if best := max(known, key=lambda run: run["speed_up"], default=None):
            speed, ideal = f"{best['speed_up']:.2f} times as fast as one", f"{best['efficiency']:.0%} of the ideal"
            say(f"With {batch}, {best['processes']} processes are {speed}, {ideal}.")
    say("Messages are equally long in all steps, but a smaller share of a batch leaves less to compute between them.")


def tell_steps(runs: list[dict], args: argparse.Namespace) -> None:
    """Say where a step's time goes."""
    columns = {"ms of a step of": "{name}", "step": "{step:.2f}", "data": "{data:.2f}", "computing": "{compute:.2f}"}
    table("Where a step's time goes", runs, columns | {"messages": "{exposed:.2f}", "hidden": "{hidden:.2f}"})
    say("step = data + computing + messages; hidden ones fly while it computes. Traced steps are slower than others.")
    for run in (run for run in runs if not run["failed"]):
        hidden = run["hidden"] / max(run["hidden"] + run["exposed"], 1e-9)
        say(f"{run['name']}: {run['exposed'] / run['step']:.0%} waits for messages, {hidden:.0%} of them are hidden.")
        if "ddp" in run["words"] and hidden < 0.05:
            say("DDP sends a bucket while backward() goes on, but a small model has one, full only at the end.")


def tell_widths(rows: list[dict], args: argparse.Namespace) -> None:
    """Say from which width on several processes are faster than one."""
    columns = {"width": "{width}", "1 process, images/s": "{one:,.0f}", f"DDP, {args.gpus}, images/s": "{several:,.0f}"}
    table("Width of the layers", rows, columns | {"waits for messages": "{messages:.0%}"})
    known = [row for row in rows if row["one"] and row["several"]]
    pays = next((place for place, row in enumerate(known) if row["several"] > row["one"]), None)
    where = "not within these widths" if pays is None else f"at the first width, {known[0]['width']}, or before"
    if pays:
        where = f"between the widths {known[pays - 1]['width']} and {known[pays]['width']}"
    shares = [row["messages"] for row in rows if row["messages"] is not None] or [0]
    say(
        f"DDP starts to pay: {where}. Computing and messages both grow with the square of the width;",
        f"what a message costs however short it is does not. The share of messages goes from {shares[0]:.0%} to",
        f"{shares[-1]:.0%}"
        + (" with it." if shares[-1] < shares[0] else ": only a larger batch makes it smaller here."),
    )
