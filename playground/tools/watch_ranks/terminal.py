"""What the terminal can show: how many columns, colours, and words."""

import os
import shutil
import sys

CODES = {"red": 31, "green": 32}


def columns():
    """Return how wide a table may be: as wide as the terminal, and 80 in a file or a pipe."""
    return min(100, shutil.get_terminal_size().columns)


def coloured(text, colour):
    """Return a text in a colour, or as it is if stdout is no terminal or NO_COLOR is set."""
    if os.environ.get("NO_COLOR") or not (sys.stdout and sys.stdout.isatty()):
        return text
    return f"\033[{CODES[colour]}m{text}\033[0m"


def ranks_in_words(ranks):
    """Return ranks as text, such as "rank 2", or "ranks 0, 1 and 3"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
