"""How fast six ways of data parallelism train over 10 Mbit/s, in runs of sending_less.py."""

import os
import re
import subprocess
import sys
from pathlib import Path

from figures.processes import EPOCH
from figures.style import BLUE, GREEN, INK, ORANGE, PINK, SKY, new_figure, save

REHEARSAL = Path(__file__).resolve().parents[2] / "run" / "rehearse_two_nodes.sh"
WAYS = {  # flags of the lesson; the epochs of each take a minute or two
    "DDP": "--epochs 1",
    "bf16": "--by bf16 --epochs 2",
    "powersgd": "--by powersgd --epochs 5",
    "local": "--by local --epochs 12",
    "diloco": "--by diloco --epochs 12",
    "batch of 1280": "--batch_size 1280 --lr 1e-2 --epochs 5",
}


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
    command = [REHEARSAL, "playground/sending_less.py", *flags]
    done = subprocess.run(
        command, env=os.environ | settings, check=True, stdout=subprocess.PIPE, text=True
    )
    found = {"seconds": [], "loss": [], "test": []}
    total = 0.0
    for loss, _, test, seconds, _ in re.findall(EPOCH, done.stdout):
        total += float(seconds)
        found["seconds"].append(round(total, 2))
        found["loss"].append(float(loss))
        found["test"].append(float(test))
    sent = re.search(r"sent by this node: (\S+) MB", done.stdout)
    return found | {"megabytes": round(float(sent[1]) / len(found["loss"]), 2)}


def draw(counts: dict, path: Path) -> None:
    """Draw the test accuracy over the seconds of training, with 2 and with 4 ranks."""
    colours = dict(zip(WAYS, (INK, SKY, GREEN, ORANGE, PINK, BLUE), strict=True))
    figure, [panels] = new_figure(1, 2, 4.2, sharey=True)
    for axes, (ranks, runs) in zip(panels, counts.items(), strict=True):
        for way, found in runs.items():
            look = {"color": colours[way], "marker": "o", "markersize": 4, "label": way}
            axes.plot(found["seconds"], found["loss"], **look)
        axes.set_xscale("log")
        axes.set_title(ranks)
        axes.set_xlabel("seconds")
    save(figure, path)
