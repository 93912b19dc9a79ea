"""How fast several ways of data parallelism train over 10 Mbit/s, in runs of sending_less.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

from figures.style import BLUE, INK, ORANGE, PINK, VERMILLION, new_figure, save
from watching.runs import epochs

REHEARSAL = Path(__file__).resolve().parents[3] / "run" / "rehearse_two_nodes.sh"
WAYS = {  # flags of the lesson; the epochs of each take a minute or two
    "DDP": "--epochs 1",
    "local": "--by local --epochs 12",
    "diloco": "--by diloco --epochs 12",
    "batch of 1280": "--batch_size 1280 --lr 1e-2 --epochs 5",
    "batch of 5120": "--batch_size 5120 --lr 2e-2 --epochs 12",
}
COLOURS = (INK, ORANGE, PINK, BLUE, VERMILLION)
LABELS = {  # of the lines: at which dot, how far from it, and where the text ends at this place
    "DDP": ("DDP", 0, (8, 0), "left"),
    "local": ("local SGD", -1, (8, -4), "left"),
    "diloco": ("DiLoCo", 0, (-8, 0), "right"),
    "batch of 1280": ("batch of 1280", 0, (0, 12), "center"),
    "batch of 5120": ("batch of 5120", 0, (8, 0), "left"),
}
WRONG = (2, 3, 4, 6, 10, 20)  # marks of an axis
SECONDS = (2, 5, 10, 20, 50, 100)


def count() -> dict[str, dict[str, dict]]:
    """Train on MNIST in each way, with one and with two ranks on each of two nodes."""
    counts = {}
    for ranks_of_node in (1, 2):
        runs = {way: run(ranks_of_node, flags.split()) for way, flags in WAYS.items()}
        counts[f"{2 * ranks_of_node} ranks"] = runs
    return counts


def run(ranks_of_node: int, flags: list[str]) -> dict[str, list | float]:
    """Train on two simulated nodes that send at most 10 Mbit/s.

    Returns:
        For each epoch, "seconds" of training since the start, "loss" and "test" (accuracy, %).
        "megabytes" that a node sends in an epoch.
    """
    settings = {"GPUS": str(ranks_of_node), "BANDWIDTH": "10mbit", "PYTHON": sys.executable}
    command = [REHEARSAL, "playground/replicated/sending_less.py", *flags]
    done = subprocess.run(
        command, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True
    )
    found = {"seconds": [], "loss": [], "test": []}
    total = 0.0
    for epoch in epochs(re.sub("^node0: ", "", done.stdout, flags=re.M)):
        total += epoch["seconds"]
        found["seconds"].append(round(total, 2))
        found["loss"].append(epoch["loss"])
        found["test"].append(epoch["test"])
    sent = re.search(r"sent by this node: (\S+) MB", done.stdout)
    return found | {"megabytes": round(float(sent[1]) / len(found["loss"]), 2)}


def draw(counts: dict, path: Path) -> None:
    """Draw the errors of the ways over the seconds of training. A dot is the end of an epoch."""
    figure, panels = new_figure("Over 10 Mbit/s, sending less trains sooner", 2, 1, 7, sharex=True)
    for panel, (ranks, runs) in zip(panels[:, 0], counts.items(), strict=True):
        for (way, found), colour in zip(runs.items(), COLOURS, strict=True):
            wrong = [100 - accuracy for accuracy in found["test"]]
            panel.plot(found["seconds"], wrong, color=colour, marker="o", markersize=4)
            name, place, offset, side = LABELS[way]
            dot = (found["seconds"][place], wrong[place])
            look = {"textcoords": "offset points", "color": colour, "weight": "bold"}
            panel.annotate(name, dot, offset, ha=side, va="center", **look)
        goal = runs["DDP"]["test"][-1]
        seconds = {}
        for way in ("DDP", "diloco"):
            reached = zip(runs[way]["seconds"], runs[way]["test"], strict=True)
            seconds[way] = min(second for second, test in reached if test >= goal)
        text = "{}: DDP needs {DDP:.0f} s for what DiLoCo has after {diloco:.0f} s"
        panel.set_title(text.format(ranks, **seconds), loc="left")
        panel.text(0.01, 0.03, "\u2199 better", transform=panel.transAxes)
        panel.set(xscale="log", yscale="log", ylabel="% wrong in the test")
        panel.set_yticks(WRONG, [str(mark) for mark in WRONG])
        panel.minorticks_off()
        panel.grid()
    panel.set_xticks(SECONDS, [str(mark) for mark in SECONDS])
    panel.set_xlim(1.7, 200)
    panel.set_xlabel("seconds of training")
    save(figure, path)
