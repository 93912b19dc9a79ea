"""How fast several ways of data parallelism train over 10 Mbit/s, in runs of sending_less.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

from figures.style import BLUE, GREEN, GREY, INK, ORANGE, PINK, SKY, VERMILLION, new_figure, save
from watching.runs import epochs

REHEARSAL = Path(__file__).resolve().parents[3] / "run" / "rehearse_two_nodes.sh"
WAYS = {  # flags of the lesson; the epochs of each take a minute or two
    "DDP": "--epochs 1",
    "bf16": "--by bf16 --epochs 2",
    "powersgd": "--by powersgd --epochs 5",
    "local": "--by local --epochs 12",
    "diloco": "--by diloco --epochs 12",
    "batch of 1280": "--batch_size 1280 --lr 1e-2 --epochs 5",
    "batch of 5120": "--batch_size 5120 --lr 2e-2 --epochs 12",
}
COLOURS = (INK, SKY, GREEN, ORANGE, PINK, BLUE, VERMILLION)
LOSSES = (0.03, 0.1, 0.3)  # marks of an axis
WRONG = (2, 3, 4, 6, 10)


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
    """Draw what the ways reach over the seconds of training. The last dot is the last epoch."""
    figure, panels = new_figure(2, 2, 6.4, sharex=True, sharey="row")
    for column, (ranks, runs) in enumerate(counts.items()):
        top, bottom = panels[:, column]
        for (way, found), colour in zip(runs.items(), COLOURS, strict=True):
            look = {"color": colour, "marker": "o", "markersize": 4, "label": way}
            wrong = [100 - accuracy for accuracy in found["test"]]
            top.plot(found["seconds"], found["loss"], **look)
            bottom.plot(found["seconds"], wrong, **look)
        top.set_title(ranks, weight="bold")
        bottom.set_xlabel("seconds of training")
    for axes in panels.flat:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(color=GREY)
    for row, name, marks in ((0, "loss in training", LOSSES), (1, "% wrong in the test", WRONG)):
        panels[row, 0].set_ylabel(name)
        panels[row, 0].set_yticks(marks, [str(mark) for mark in marks])
        panels[row, 0].minorticks_off()
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    save(figure, path)
