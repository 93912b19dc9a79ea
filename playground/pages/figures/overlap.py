"""When rank 0 computes and when its messages travel, in a step of profile_steps.py with DDP."""

from pathlib import Path

from figures.style import BLUE, GREEN, ORANGE, VERMILLION, arrow, box, new_figure, save


def draw(counts: dict, path: Path) -> None:
    """Draw when rank 0 computes, and when its messages travel, in a step with DDP."""
    colours = {"forward": BLUE, "backward": VERMILLION, "optimizer": GREEN}
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
