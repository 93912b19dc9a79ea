"""Which chunk each rank sends in a ring all-reduce, and what it then holds."""

from pathlib import Path
from unittest import mock

import nonblocking_p2p
import torch
import torch.distributed as dist
from torch import Tensor

from figures.counting import of_all_ranks
from figures.style import BLUE, ORANGE, PALE, SKY, arrow, box, new_figure, save

RANKS = 4


def count() -> dict[str, list]:
    """Add up a tensor with one number for each rank, by ring_all_reduce() of nonblocking_p2p.py.

    Returns:
        "sent": for each rank and step the number of the chunk that the rank sends.
        "held": for each rank, at the start and after each step, a text for each chunk, such as
            "013": it is the sum of the chunks of these ranks.
    """
    rank = dist.get_rank()
    # Bit r of a chunk says whether the chunk of rank r has been added.
    numbers = torch.full((dist.get_world_size(),), 2.0**rank)
    sent = []
    held_chunks = []
    start_exchange = nonblocking_p2p.start_exchange

    def noted(mine, theirs, right, left):
        sent.append(mine.storage_offset())  # each chunk is one number
        held_chunks.append(_added_ranks(numbers))
        return start_exchange(mine, theirs, right, left)

    with mock.patch.object(nonblocking_p2p, "start_exchange", noted):
        nonblocking_p2p.ring_all_reduce(numbers)
    held_chunks.append(_added_ranks(numbers))
    return {"sent": of_all_ranks(sent), "held": of_all_ranks(held_chunks)}


def _added_ranks(numbers: Tensor) -> list[str]:
    """Return for each number the ranks whose bits are set in it."""
    texts = []
    for number in numbers.tolist():
        bits = f"{int(number):b}"[::-1]
        texts.append("".join(str(rank) for rank, bit in enumerate(bits) if bit == "1"))
    return texts


def draw(counts: dict, path: Path) -> None:
    """Draw the chunks of each rank after each step, and an arrow for each one that it sends."""
    ranks = len(counts["sent"])
    steps = len(counts["sent"][0])
    colours = {1: "none", 2: PALE, 3: SKY, 4: BLUE}  # by how many chunks have been added
    title = f"After {steps} steps, each of {ranks} ranks has the sums of all chunks"
    figure, panels = new_figure(title, 2, ranks, 5.2)
    for step, axes in enumerate(panels.flat):
        axes.set_xlim(-0.1, ranks + 0.1)
        axes.set_ylim(-0.4, ranks + 0.8)
        axes.set_aspect("equal")
        axes.axis("off")
        if step > steps:
            break
        axes.set_title("at the start" if step == 0 else f"after step {step}")
        for rank in range(ranks):
            y = ranks - 1 - rank
            if step % ranks == 0:  # the first panel of a row
                axes.text(-0.2, y + 0.5, f"rank {rank}", ha="right", va="center")
            for number, added in enumerate(counts["held"][rank][step]):
                text = "".join("abcdefgh"[int(each)] for each in added)
                text = "sum" if len(added) == ranks else text
                box(axes, (number, y), (1, 1), colours[len(added)], text, fontsize=10)
        for rank in range(ranks):
            if step == steps:
                break
            number = counts["sent"][rank][step]
            y = ranks - 1 - rank
            box(axes, (number, y), (1, 1), "none", edgecolor=ORANGE, linewidth=3, zorder=3)
            # The rank below the last one is rank 0, so its arrow begins again at the top.
            starts = [y + 0.18] if rank < ranks - 1 else [0.18, ranks + 0.7]
            for start in starts:
                x = number + 0.5
                arrow(axes, (x, start), (x, start - 0.45), ORANGE, linewidth=2.5)
    half = steps // 2
    words = "Each rank sends\nthe orange chunk to\nthe rank below it,\nand rank 3 to rank 0.\n\n"
    words += f"reduce-scatter:\nsteps 1 to {half}\n\nall-gather:\nsteps {half + 1} to {steps}"
    panels[-1, -1].text(-0.2, ranks / 2, words, va="center", fontsize=11)
    save(figure, path)
