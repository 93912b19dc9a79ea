"""Which layers are whole on a rank while each layer computes, with FSDP."""

from pathlib import Path

from figures.style import BLUE, GREY, ORANGE, add_legend, box, new_figure, save


def draw(counts: dict, path: Path) -> None:
    """Draw a column for each time at which a layer computes, and in it what is whole then."""
    sizes = counts["layers"]
    layers = len(sizes)
    title = "FSDP: one layer is whole, and one more in the buffer"
    figure, panels = new_figure(title, 2, 1, 7.6)
    titles = {"freed": "FSDP", "kept": "FSDP with --keep_weights"}
    for panel, (name, title) in zip(panels[:, 0], titles.items(), strict=True):
        most = 0
        for place, moment in enumerate(counts[name]):
            x = place if moment["direction"] == "forward" else place + 0.6
            for layer in range(1, layers + 1):
                colour = BLUE if layer in moment["whole"] else "none"
                box(panel, (x - 0.5, -layer - 0.5), (1, 1), colour, edgecolor=GREY)
            colour = ORANGE if moment["buffer"] else "none"
            box(panel, (x - 0.5, -layers - 1.7), (1, 1), colour, edgecolor=GREY)
            together = moment["buffer"] + sum(sizes[layer - 1] for layer in moment["whole"])
            most = max(most, together)
            look = {"ha": "center", "va": "center", "fontsize": 9}
            panel.text(x, -layers - 2.4, f"{together / 1e6:.1f}", **look)
            panel.text(x, -layers - 3.4, moment["computes"], **look)
        panel.set_xticks([])
        rows = [f"layer {layer}" for layer in range(1, layers + 1)]
        rows[-1] += " (tiny)"
        rows += ["buffer", "both, MB", "computing: layer"]
        places = [-layer for layer in range(1, layers + 1)]
        places += [-layers - 1.2, -layers - 2.4, -layers - 3.4]
        panel.set_yticks(places, rows, fontsize=11)
        panel.tick_params(length=0)
        panel.set_xlim(-0.6, x + 0.6)
        panel.set_ylim(-layers - 5.1, -0.4)
        panel.spines[:].set_visible(False)
        panel.set_title(f"{title}: layers and buffer are at most {most / 1e6:.1f} MB", loc="left")
        for half, text in ((0, "forward pass"), (layers + 0.6, "backward pass")):
            panel.text(half + (layers - 1) / 2, -layers - 4.4, text, ha="center", va="center")
    buffer = "buffer: it arrives here (backward: the next)"
    add_legend(figure, {"layer is whole": BLUE, buffer: ORANGE})
    save(figure, path)
