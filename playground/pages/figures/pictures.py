"""The pictures that explain the ideas of this course.

Each is a file of this folder with two functions. count() counts bytes, messages and orders, or
notes times, while functions of the lessons run. draw() draws the picture from these counts. They
are kept beside the pictures, in pictures.json.

    python playground/pages/figures/pictures.py  # count and draw nearly all pictures
    python playground/pages/figures/pictures.py ring overlap  # only these two
    python playground/pages/figures/pictures.py ring --keep  # draw from the counts in pictures.json
    python playground/pages/figures/pictures.py sending_less  # about 25 minutes, so only if named

count() is called on each of RANKS ranks, on CPUs, and returns the same on all of them: numbers and
texts that JSON can hold. Those of overlap.py and sending_less.py start their own ranks.
"""

import argparse
import json
import sys
from pathlib import Path

PLAYGROUND = Path(__file__).resolve().parents[2]
PARTS = ("..", "", "replicated", "sharded", "split", "transformer", "language", "pages", "tools")
for part in PARTS:
    sys.path.append(str(PLAYGROUND / part))  # find common/, the lessons, figures/ and watching/
from figures import (
    context,
    data_parallel,
    experts,
    fsdp,
    holds,
    mesh,
    overlap,
    parts,
    ring,
    schedules,
    sending_less,
    split,
    tensor,
    waits,
)
from figures.counting import in_ranks

FIGURES = PLAYGROUND / "pages" / "figures"
COUNTS = FIGURES / "pictures.json"
PICTURES = {
    "holds": holds,
    "waits": waits,
    "ring": ring,
    "data_parallel": data_parallel,
    "overlap": overlap,
    "sending_less": sending_less,
    "fsdp": fsdp,
    "schedules": schedules,
    "tensor": tensor,
    "mesh": mesh,
    "split": split,
    "context": context,
    "experts": experts,
    "parts": parts,
}
STARTING = ("overlap", "sending_less")  # these start their own ranks


def count(names: list[str]) -> dict[str, dict]:
    """Return the counts of some pictures. Those with equally many ranks share the processes."""
    counts = {}
    for world_size in (2, 4, 16):
        functions = {}
        for name in names:
            if getattr(PICTURES[name], "RANKS", None) == world_size:
                functions[name] = PICTURES[name].count
        if functions:
            counts |= in_ranks(functions, world_size)
    for name in STARTING:
        if name in names:
            counts[name] = PICTURES[name].count()
    return counts


def main() -> None:
    """Count what the pictures show, keep the counts, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(PICTURES)
    which = f"{', '.join(names)}; default: all but sending_less"
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=which)
    parser.add_argument("--keep", action="store_true", help="draw from pictures.json, do not count")
    args = parser.parse_args()
    wrong = [name for name in args.pictures if name not in names]
    if wrong:
        parser.error(f"there is no picture {wrong[0]}: choose from {', '.join(names)}")
    wanted = args.pictures or [name for name in names if name != "sending_less"]
    counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if not args.keep:
        counts |= count(wanted)
        lines = [f'"{name}": {json.dumps(counts[name])}' for name in names if name in counts]
        COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name in wanted:
        PICTURES[name].draw(counts[name], FIGURES / f"{name}.png")
        print(f"wrote {FIGURES / name}.png")


if __name__ == "__main__":
    main()
