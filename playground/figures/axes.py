"""What the ranks of three_axes.py send along each axis."""

from pathlib import Path

import context_parallel
import three_axes
import torch.distributed as dist

from common.models import TOKENS, Transformer
from figures.counting import forward_and_backward, of_all_ranks, random_batch
from figures.messages import Messages
from figures.style import BLUE, GREY, ORANGE, PINK, add_key, box, double_arrow, new_figure, save

RANKS = 8


def count() -> dict[str, list]:
    """Count what each rank of three_axes.py sends in a step, on a mesh of 2 x 2 x 2 ranks.

    The global batch has 128 images.

    Returns:
        For each axis the bytes that each rank sends along it.
    """
    names = ("dp", "cp", "tp")
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    model = Transformer()
    attend = context_parallel.RingAttention.apply
    places = context_parallel.zigzag(TOKENS, 2)
    context_parallel.split_tokens(model, attend, places, mesh.get_group("cp"))
    three_axes.split_by_hand(model, sequence=False, group=mesh.get_group("tp"))
    with Messages() as messages:
        forward_and_backward(model, *random_batch(64))
        three_axes.add_up_gradients(model, [mesh.get_group("dp"), mesh.get_group("cp")])
    sent = {}
    for name in names:
        own = round(messages.sent(group=mesh.get_group(name).group_name))
        sent[name] = of_all_ranks(own)
    return sent


def draw(counts: dict, path: Path) -> None:
    """Draw eight ranks in two grids, and along each axis an arrow as wide as the bytes sent."""
    colours = {"dp": BLUE, "cp": ORANGE, "tp": PINK}
    travels = {
        "dp": "dp: gradients",
        "cp": "cp: keys, values, gradients",
        "tp": "tp: terms of activations",
    }
    figure, panels = new_figure(1, 1, 4.6)
    panel = panels[0, 0]
    most = max(max(sent) for sent in counts.values())
    width = {name: 0.55 * max(sent) / most for name, sent in counts.items()}
    amount = {name: f"{max(sent) / 1000:,.0f} kB" for name, sent in counts.items()}
    for replica in range(2):
        left = 4.3 * replica
        box(panel, (left - 0.3, -2.0), (3.0, 3.0), "white", linestyle="--")
        panel.text(left + 1.2, 1.1, f"dp {replica}: 64 images", ha="center", va="bottom")
        for row in range(2):
            for column in range(2):
                rank = 4 * replica + 2 * row + column
                box(panel, (left + 1.7 * column, -1.7 * row), (0.7, 0.7), GREY, f"rank\n{rank}")
            y = 0.35 - 1.7 * row
            double_arrow(panel, (left + 0.72, y), (left + 1.68, y), width["tp"], colours["tp"])
        for column in range(2):
            x = left + 0.35 + 1.7 * column
            double_arrow(panel, (x, -0.98), (x, -0.02), width["cp"], colours["cp"])
        panel.text(left + 1.2, 0.75, amount["tp"], ha="center", va="center")
        panel.text(left + 1.2, -0.5, amount["cp"], ha="center", va="center")
    double_arrow(panel, (2.72, -0.5), (3.98, -0.5), width["dp"], colours["dp"])
    panel.text(3.35, -0.1, amount["dp"], ha="center", va="center")
    panel.set_xlim(-0.4, 7.1)
    panel.set_ylim(-2.1, 1.5)
    panel.set_aspect("equal")
    panel.axis("off")
    figure.suptitle("kB sent by each rank in a step", fontsize=14, weight="bold")
    add_key(figure, {travels[name]: colours[name] for name in colours})
    save(figure, path)
