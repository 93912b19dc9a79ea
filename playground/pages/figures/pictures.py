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
from importlib import import_module
from pathlib import Path

PLAYGROUND = Path(__file__).resolve().parents[2]
PARTS = ("..", "", "replicated", "sharded", "split", "transformer", "language", "pages", "tools")
for part in PARTS:
    sys.path.append(str(PLAYGROUND / part))  # find common/, the lessons, figures/ and watching/
from figures.counting import counts_of
from watching.ranks import call

FIGURES = PLAYGROUND / "pages" / "figures"
COUNTS = FIGURES / "pictures.json"
NAMES = ("holds", "waits", "ring", "data_parallel", "overlap", "sending_less", "fsdp")
NAMES += ("schedules", "tensor", "mesh", "split", "context", "experts", "parts")
PICTURES = {name: import_module(f"figures.{name}") for name in NAMES}
STARTING = ("overlap", "sending_less")  # these start their own ranks


def count(names: list[str]) -> dict[str, dict]:
    """Return the counts of some pictures. Those with equally many ranks share the processes."""
    counts = {}
    for world_size in sorted({getattr(PICTURES[name], "RANKS", 0) for name in names} - {0}):
        functions = {}
        for name in names:
            if getattr(PICTURES[name], "RANKS", 0) == world_size:
                functions[name] = PICTURES[name].count
        counts |= call(counts_of, world_size, functions)[0]
    for name in STARTING:
        if name in names:
            counts[name] = PICTURES[name].count()
    return counts


def main() -> None:
    """Count what the pictures show, keep the counts, and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = f"{', '.join(NAMES)}; default: all but sending_less"
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=which)
    parser.add_argument("--keep", action="store_true", help="draw from pictures.json, do not count")
    args = parser.parse_args()
    wrong = [name for name in args.pictures if name not in NAMES]
    if wrong:
        parser.error(f"there is no picture {wrong[0]}: choose from {', '.join(NAMES)}")
    wanted = args.pictures or [name for name in NAMES if name != "sending_less"]
    counts = json.loads(COUNTS.read_text()) if COUNTS.exists() else {}
    if not args.keep:
        counts |= count(wanted)
        lines = [f'"{name}": {json.dumps(counts[name])}' for name in NAMES if name in counts]
        COUNTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for name in wanted:
        PICTURES[name].draw(counts[name], FIGURES / f"{name}.svg")
        print(f"wrote {FIGURES / name}.svg")


if __name__ == "__main__":
    main()
