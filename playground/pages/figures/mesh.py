"""What the ranks of hybrid_parallel.py send along both axes of a mesh."""

from pathlib import Path

import hybrid_parallel
import torch.distributed as dist

from common.models import MLP
from figures.counting import forward_and_backward, of_all_ranks, random_batch, two_rows
from figures.style import BLUE, GREY, ORANGE, PINK, add_legend, box, double_arrow, new_figure, save
from watching.messages import Messages

RANKS = 4


def count() -> list[dict]:
    """Count what each rank of hybrid_parallel.py sends in a step on a mesh with two rows.

    Returns:
        A dict for each picture: "kind", "images" (in the global batch), "mesh" (the ranks of each
        row), and "sent": for each axis the bytes that each rank sends.
    """
    pictures = []
    two_kinds = two_rows(("dp", "tp"))
    for kind, images in (("tp", 128), ("tp", 1024), ("hsdp", 128)):
        model = MLP()
        if kind == "tp":
            mesh = two_kinds
            hybrid_parallel.split(model, mesh["tp"])
            hybrid_parallel.shard(model, mesh["dp"])
            batch = random_batch(images // 2)
        else:
            mesh = two_rows(("replicate", "shard"))
            hybrid_parallel.shard(model, mesh)
            batch = random_batch(images // dist.get_world_size())
        forward_and_backward(model, *batch)  # the first step gathers more
        with Messages() as messages:
            forward_and_backward(model, *batch)
        sent = {}
        for axis in mesh.mesh_dim_names:
            own = round(messages.sent(group=mesh[axis].get_group().group_name))
            sent[axis] = of_all_ranks(own)
        picture = {"kind": kind, "images": images, "mesh": mesh.mesh.tolist(), "sent": sent}
        pictures.append(picture)
    return pictures


def draw(counts: list, path: Path) -> None:
    """Draw the ranks of each mesh in a grid, and arrows as wide as the bytes that they send."""
    titles = {"tp": "\u2194 tensor parallel, \u2195 FSDP", "hsdp": "\u2194 FSDP, \u2195 replicas"}
    travels = {
        "tp": ("activations, their gradients", PINK),
        "dp": ("parameters, gradients", BLUE),
        "shard": ("parameters, gradients", BLUE),
        "replicate": ("gradients only", ORANGE),
    }
    title = "With a larger batch, only tensor parallelism sends more"
    figure, panels = new_figure(title, 1, len(counts), 4.2)
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
