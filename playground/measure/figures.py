"""The figures of compare.py: readable without colour, drawn into files, so that no display is needed.

Each function takes runs, or the rows of a table, and the path of a PNG. Runs that have failed are left out; if there is
no other, there is no figure.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "hatch.linewidth": 0.6})
INK, GREY = "0.1", "0.8"


def _save(figure: Figure, path: Path) -> None:
    """Write a figure."""
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)


def _label(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Write the lines' names beside their right ends: the upper one's above, the lower one's below."""
    for place, (text, end) in enumerate(sorted(ends.items(), key=lambda item: -item[1][1])):
        axes.annotate(text, end, xytext=(9, 6 - 12 * place), textcoords="offset points", va="center")


def draw_speed(runs: list[dict], path: Path) -> None:
    """Draw images/s, start-up time and memory of each run as bars."""
    runs = [run for run in reversed(runs) if not run["failed"]]
    if not runs:
        return
    figure, panels = plt.subplots(1, 3, sharey=True, figsize=(11, 1 + 0.35 * len(runs)))
    columns = {"images_per_s": "images/s", "start_up_s": "start-up, s", "memory_mib": "peak memory, MiB"}
    for panel, (name, title) in zip(panels, columns.items(), strict=True):
        bars = panel.barh([run["name"] for run in runs], [run[name] for run in runs], color=GREY, edgecolor=INK)
        panel.bar_label(bars, fmt="{:.1f}" if name == "start_up_s" else "{:,.0f}", padding=3)
        panel.set_xlabel(title)
        panel.margins(x=0.3)
        panel.locator_params(axis="x", nbins=3)
        panel.xaxis.set_major_formatter("{x:g}" if name == "start_up_s" else "{x:,.0f}")
    _save(figure, path)


def draw_scaling(runs: list[dict], path: Path) -> None:
    """Draw the speed-up over the number of processes, and the line that would be ideal."""
    runs = [run for run in runs if "speed_up" in run]
    if not runs:
        return
    counts = sorted({run["processes"] for run in runs})
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(counts, counts, ":", color=INK)
    axes.annotate("ideal", (counts[-1], counts[-1]), xytext=(9, 0), textcoords="offset points", va="center")
    ends = {}
    kinds = (("strong", "o-", INK, "same batch for all"), ("weak", "s--", "white", "same batch for each"))
    for kind, look, fill, text in kinds:
        line = [(run["processes"], run["speed_up"]) for run in runs if run["kind"] == kind or run["processes"] == 1]
        axes.plot(*zip(*line, strict=True), look, color=INK, markerfacecolor=fill)
        ends[text] = line[-1]
    _label(axes, ends)
    axes.set(xlabel="processes", ylabel="speed-up over one process", ylim=(0, None), xticks=counts)
    _save(figure, path)


def draw_steps(runs: list[dict], path: Path) -> None:
    """Draw each run's step as a bar, cut into what its time goes into."""
    runs = [run | {"alone": run["compute"] - run["hidden"]} for run in reversed(runs) if not run["failed"]]
    if not runs:
        return
    parts = {
        "data": ("data", "0.4", ""),
        "alone": ("computing", GREY, ""),
        "hidden": ("computing that hides messages", GREY, "///"),
        "exposed": ("messages", "white", "..."),
    }
    figure, axes = plt.subplots(figsize=(9, 0.8 + 0.5 * len(runs)))
    names, ends = [run["name"] for run in runs], [0.0] * len(runs)
    for part, (text, color, hatch) in parts.items():
        lengths = [run[part] for run in runs]
        axes.barh(names, lengths, 0.6, left=ends, label=text, color=color, hatch=hatch, edgecolor=INK)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.set_xlabel("ms of a traced step")
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1), frameon=False)
    _save(figure, path)


def draw_widths(rows: list[dict], path: Path) -> None:
    """Draw both speeds over the width and, below, the share of a step that goes into messages."""
    lines = {
        name: [(row["width"], row[name]) for row in rows if row[name] is not None]
        for name in ("one", "several", "messages")
    }
    if not all(lines.values()):
        return
    figure, (speed, share) = plt.subplots(2, 1, sharex=True, figsize=(6, 5), height_ratios=(2, 1))
    speed.plot(*zip(*lines["one"], strict=True), "o-", color=INK)
    speed.plot(*zip(*lines["several"], strict=True), "s--", color=INK, markerfacecolor="white")
    _label(speed, {"one process": lines["one"][-1], "DDP": lines["several"][-1]})
    share.plot(*zip(*lines["messages"], strict=True), "^-", color=INK)
    speed.set(ylabel="images/s", xscale="log", yscale="log")
    speed.margins(y=0.15)  # room for the lower one's name
    for formatter in (speed.yaxis.set_major_formatter, speed.yaxis.set_minor_formatter):
        formatter(lambda value, _: f"{value:,.0f}" if f"{value:e}"[0] in "125" else "")
    widths = [row["width"] for row in rows]
    share.set_xticks(widths, widths)
    share.minorticks_off()
    share.set(xlabel="width: neurons in each hidden layer", ylabel="share of a step\nfor messages", ylim=(0, 1))
    share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _save(figure, path)
