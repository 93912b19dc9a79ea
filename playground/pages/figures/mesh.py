"""What the ranks of hybrid_parallel.py send along both axes of a mesh."""

from pathlib import Path

from figures.style import BLUE, GREY, ORANGE, PINK, add_legend, box, double_arrow, new_figure, save


def draw(counts: list, path: Path) -> None:
    """Draw the ranks of each mesh in a grid, and arrows as wide as the bytes that they send."""
    titles = {
        "tp": "\u2194 tensor parallel, \u2195 FSDP",
        "hsdp": "another mesh:\n\u2194 FSDP, \u2195 replicas",
    }
    travels = {
        "tp": ("activations, their gradients", PINK),
        "dp": ("parameters, gradients", BLUE),
        "shard": ("parameters, gradients", BLUE),
        "replicate": ("gradients only", ORANGE),
    }
    title = "What a rank sends in a step: with 8 times the images,\n"
    title += "only tensor parallelism sends more"
    figure, panels = new_figure(title, 1, len(counts), 4.5)
    most = 0
    for picture in counts:
        most = max([most, *(max(sent) for sent in picture["sent"].values())])
    for panel, picture in zip(panels[0], counts, strict=True):
        down, across = picture["sent"]
        for row, ranks in enumerate(picture["mesh"]):
            for column, rank in enumerate(ranks):
                box(panel, (1.6 * column, -1.6 * row), (0.7, 0.7), GREY, f"rank\n{rank}")
        for row, (rank, _) in enumerate(picture["mesh"]):
            y = 0.35 - 1.6 * row
            width = 0.55 * picture["sent"][across][rank] / most
            double_arrow(panel, (0.72, y), (1.58, y), width, travels[across][1])
            amount = f"{picture['sent'][across][rank] / 1000:.0f} kB"
            above = row == 0
            place = y + 0.4 if above else y - 0.4
            panel.text(1.15, place, amount, ha="center", va="bottom" if above else "top")
        for column, rank in enumerate(picture["mesh"][0]):
            x = 0.35 + 1.6 * column
            width = 0.55 * picture["sent"][down][rank] / most
            double_arrow(panel, (x, -0.88), (x, -0.02), width, travels[down][1])
            amount = f"{picture['sent'][down][rank] / 1000:.0f}\nkB"
            beside = 0.68 if column == 0 else 1.62  # on the inner side of its arrow
            panel.text(beside, -0.45, amount, ha="left" if column == 0 else "right", va="center")
        panel.set_title(f"{titles[picture['kind']]}\n{picture['images']:,} images", fontsize=11)
        panel.set_xlim(-0.1, 2.4)
        panel.set_ylim(-1.95, 1.15)
        panel.set_aspect("equal")
        panel.axis("off")
    add_legend(figure, dict(travels.values()))
    save(figure, path)
