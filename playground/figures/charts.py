"""The figures of compare.py.

Each function takes runs, or the rows of a table, and the path of a PNG. Runs that have failed are
left out. If no run is left, no figure is drawn.
"""

from pathlib import Path

from matplotlib.axes import Axes

from figures.style import BLUE, GREEN, GREY, INK, ORANGE, SKY, add_legend, new_figure, save


def _label(axes: Axes, ends: dict[str, tuple[float, float]]) -> None:
    """Write the names of two lines beside their right ends, the name of the upper line above."""
    from_the_top = sorted(ends.items(), key=lambda item: -item[1][1])
    for place, (text, end) in enumerate(from_the_top):
        offset = (9, 7 - 14 * place)
        axes.annotate(text, end, xytext=offset, textcoords="offset points", va="center")


def _part_of_the_course(lesson: str) -> str:
    """Return what a lesson does with the model."""
    if lesson in ("single_gpu", "data_parallel", "model_parallel"):
        return "one process"
    if lesson in ("sharded_optimizer", "manual_fully_sharded", "fully_sharded_data_parallel"):
        return "model sharded"
    if lesson in ("manual_pipeline", "pipeline_parallel", "tensor_parallel", "hybrid_parallel"):
        return "model split"
    return "model replicated"


def draw_speed(runs: list, path: Path) -> None:
    """Draw images/s and memory of each run as bars, in the order of the runs."""
    runs = [run for run in reversed(runs) if not run.failed]
    if not runs:
        return
    colours = {"one process": GREY, "model replicated": BLUE}
    colours |= {"model sharded": ORANGE, "model split": GREEN}
    size = (11, 1.4 + 0.34 * len(runs))
    figure, panels = new_figure(1, 2, 0, sharey=True, figsize=size)
    columns = {"images_per_s": "images/s", "memory_mib": "peak memory, MiB"}
    names = [run.name.replace(".py", "") for run in runs]
    parts = [_part_of_the_course(run.lesson) for run in runs]
    for panel, (column, title) in zip(panels[0], columns.items(), strict=True):
        values = [getattr(run, column) for run in runs]
        bars = panel.barh(names, values, color=[colours[part] for part in parts], edgecolor=INK)
        panel.bar_label(bars, fmt="{:,.0f}", padding=3)
        panel.set_xlabel(title)
        panel.margins(x=0.25, y=0.01)
        panel.locator_params(axis="x", nbins=3)
        panel.xaxis.set_major_formatter("{x:,.0f}")
    add_legend(figure, {part: colours[part] for part in colours if part in parts})
    save(figure, path)


def draw_scaling(runs: list, path: Path) -> None:
    """Draw the speed-up over the number of processes, and the line that would be ideal."""
    runs = [run for run in runs if run.speed_up]
    if not runs:
        return
    counts = sorted({run.processes for run in runs})
    figure, [[axes]] = new_figure(1, 1, 4.5)
    axes.plot(counts, counts, ":", color=INK)
    end = (counts[-1], counts[-1])
    axes.annotate("ideal", end, xytext=(9, 0), textcoords="offset points", va="center")
    ends = {}
    for kind, look, colour, text in (
        ("strong", "o-", BLUE, "same global batch"),
        ("weak", "s--", ORANGE, "same per-rank batch"),
    ):
        line = []
        for run in runs:
            if run.kind == kind or run.processes == 1:
                line.append((run.processes, run.speed_up))
        axes.plot(*zip(*line, strict=True), look, color=colour, linewidth=2, markersize=8)
        ends[text] = line[-1]
    _label(axes, ends)
    axes.set_xlabel("processes")
    axes.set_ylabel("speed-up over one process")
    axes.set_xticks(counts)
    axes.set_ylim(0, None)
    save(figure, path)


def draw_steps(runs: list, path: Path) -> None:
    """Draw the step of each run as a bar with a section for each use of its time."""
    runs = [run for run in reversed(runs) if not run.failed]
    if not runs:
        return
    names = [run.name.replace(", ", ",\n").replace(" --", "\n--") for run in runs]
    sections = {  # the lengths of each section, and its colour
        "data": ([run.data for run in runs], GREY),
        "computing": ([run.compute - run.hidden for run in runs], BLUE),
        "computing that hides messages": ([run.hidden for run in runs], SKY),
        "messages": ([run.waiting for run in runs], ORANGE),
    }
    figure, [[axes]] = new_figure(1, 1, 1.4 + 0.8 * len(runs))
    ends = [0.0] * len(runs)
    for lengths, colour in sections.values():
        axes.barh(names, lengths, 0.6, left=ends, color=colour, edgecolor=INK, linewidth=0.6)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    axes.set_xlabel("ms of a traced step")
    add_legend(figure, {name: colour for name, (_, colour) in sections.items()})
    save(figure, path)


def draw_widths(rows: list[dict], path: Path) -> None:
    """Draw both speeds over the width, and below them the share of messages in a step."""
    lines = {}
    for name in ("one", "several", "messages"):
        lines[name] = [(row["width"], row[name]) for row in rows if row[name] is not None]
        if not lines[name]:
            return
    figure, panels = new_figure(2, 1, 6, sharex=True, height_ratios=(2, 1))
    speed, share = panels[:, 0]
    speed.plot(*zip(*lines["one"], strict=True), "o-", color=BLUE, linewidth=2, markersize=8)
    speed.plot(*zip(*lines["several"], strict=True), "s--", color=ORANGE, linewidth=2, markersize=8)
    _label(speed, {"one process": lines["one"][-1], "DDP": lines["several"][-1]})
    share.plot(*zip(*lines["messages"], strict=True), "^-", color=ORANGE, linewidth=2, markersize=8)
    speed.set(ylabel="images/s", xscale="log", yscale="log")
    speed.margins(y=0.15)  # room for the name of the lower line
    speed.yaxis.set_major_formatter(_round_number)
    speed.yaxis.set_minor_formatter(_round_number)
    widths = [row["width"] for row in rows]
    share.set_xticks(widths, widths)
    share.minorticks_off()
    share.set_xlabel("width: neurons in each hidden layer")
    share.set_ylabel("share of messages\nin a step of DDP")
    share.set_ylim(0, 1)
    share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    save(figure, path)


def _round_number(value: float, _: int) -> str:
    """Return the label of a tick: a number that begins with 1, 2 or 5; others get none."""
    first_digit = f"{value:e}"[0]
    return f"{value:,.0f}" if first_digit in "125" else ""
