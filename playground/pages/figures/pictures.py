"""Draws the pictures that explain the ideas of this course, each with a file of this folder.

    python playground/pages/figures/pictures.py  # all of them
    python playground/pages/figures/pictures.py ring overlap  # only these two

The numbers in them are in pictures.json. They were counted and measured while functions of the
lessons ran.
"""

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

FIGURES = Path(__file__).resolve().parent
sys.path.append(str(FIGURES.parent))  # find figures/


def main() -> None:
    """Draw pictures."""
    numbers = json.loads((FIGURES / "pictures.json").read_text())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = f"{', '.join(numbers)}; default: all"
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=which)
    args = parser.parse_args()
    wrong = [name for name in args.pictures if name not in numbers]
    if wrong:
        parser.error(f"there is no picture {wrong[0]}: choose from {', '.join(numbers)}")
    for name in args.pictures or numbers:
        import_module(f"figures.{name}").draw(numbers[name], FIGURES / f"{name}.svg")
        print(f"wrote {FIGURES / name}.svg")


if __name__ == "__main__":
    main()
