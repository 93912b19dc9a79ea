"""Write what stands below the folds. This carries a change of a frame into all lessons:

    python tests/develop/fold.py

A lesson that repeats functions of an earlier one has them below two lines, which name the earlier
lesson and the functions:

    # ---------- Unchanged from single_gpu.py ----------
    # You know what follows: fit_epoch(), run_epoch() and main(). If you copy this, copy them, too.

To give a lesson a fold, write these two lines at its end, and run this script.
"""

import ast
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from lessons import PATHS, READING_ORDER

FOLD = re.compile(r"^# -{10} Unchanged from (\w+)\.py -{10}\n((?:# .*\n)+)", re.M)
END = 'if __name__ == "__main__":\n    main()\n'


def definitions(text: str) -> dict[str, str]:
    """Return the functions and classes of a lesson by name, without NEW marks."""
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            part = "\n".join(lines[first - 1 : node.end_lineno])
            # A comment on lines of its own begins with a capital again.
            capital = re.compile(r"^( *# )NEW: (\w)", re.M)
            part = capital.sub(lambda mark: mark[1] + mark[2].upper(), part)
            found[node.name] = part.replace("# NEW: ", "# ")
    return found


def folded(text: str) -> str:
    """Return a lesson with what its fold names, as the earlier lesson has it.

    Raises:
        KeyError: the earlier lesson has no such function.
    """
    first = FOLD.search(text)
    if first is None:
        return text
    whole = text[: first.start()]
    for fold in FOLD.finditer(text):  # a lesson may repeat functions of two lessons
        parts = definitions(PATHS[fold[1]].read_text())
        below = [parts[name] for name in re.findall(r"(\w+)\(\)", fold[2])]
        whole += fold[0] + "\n\n" + "\n\n\n".join(below) + "\n\n\n"
    return whole + END


def main() -> None:
    """Write the folds of the lessons that were given, or of all lessons."""
    # In reading order, because a fold may repeat what an earlier lesson's fold has.
    for path in [*map(Path, sys.argv[1:])] or [PATHS[lesson] for lesson in READING_ORDER]:
        text = folded(path.read_text())
        if text != path.read_text():
            path.write_text(text)
            print(path)


if __name__ == "__main__":
    main()
