"""What the terminal can show: how many columns, and colours."""

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
