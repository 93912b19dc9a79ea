"""What one of four ranks holds, in each way of training."""

from pathlib import Path

from figures.style import BLUE, GREEN, GREY, ORANGE, PINK, add_legend, box, new_figure, save


def draw(counts: dict, path: Path) -> None:
    """Draw a bar for each way: what the rank that holds most holds."""
    colours = {"parameters": BLUE, "gradients": ORANGE, "Adam's averages": GREEN}
    colours |= {"activations": PINK, "buffers": GREY}
    names = {"one process": "one process, alone", "HSDP": "HSDP, 2 x 2", "FSDP": "FSDP (ZeRO 3)"}
    names |= {"tensor": "tensor parallel"}
    totals = {}
    for way, ranks in counts.items():
        totals[way] = max(sum(held.values()) for held in ranks) / 1e6
    title = "One of four ranks holds {DDP:.0f} MB with DDP, and {FSDP:.0f} with FSDP"
    figure, [[axes]] = new_figure(title.format(**totals), 1, 1, 4.6)
    for place, (way, ranks) in enumerate(counts.items()):
        held = max(ranks, key=lambda each: sum(each.values()))
        end = 0.0
        for kind, colour in colours.items():
            width = held[kind] / 1e6
            box(axes, (end, -place - 0.35), (width, 0.7), colour)
            end += width
        axes.text(end + 1, -place, f"{totals[way]:.0f}", va="center", weight="bold")
    texts = [names.get(way, way) for way in counts]
    axes.set_yticks([-place for place in range(len(counts))], texts)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(0.5 - len(counts), 0.5)
    axes.set_xlim(0, 112)
    axes.set_xlabel("MB")
    words = {"buffers": "buffers (of messages)"}
    add_legend(
        figure, {words.get(name, name): colour for name, colour in colours.items()}, columns=3
    )
    save(figure, path)
