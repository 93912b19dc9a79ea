"""Checks the exercises: it runs what you have written on several ranks, and gives a verdict.

    python playground/exercises/check.py                          # all exercises and their state
    python playground/exercises/check.py ring_all_reduce          # one of them
    python playground/exercises/check.py ring_all_reduce --trace  # who sent what to whom
    python playground/exercises/check.py ring_all_reduce --hint 1 # a direction; 2: the API; 3: the
                                                                  # shape of the answer
    python playground/exercises/check.py ring_all_reduce --answer # a solution, and why it is right
    python playground/exercises/check.py ring_all_reduce --reset  # start again; your file is kept

The files in this folder are the tasks. You write in copies of them, in the folder answers/, which
git ignores. The first check of an exercise makes the copy. It also works to run the file of a task
or of an answer.

The verdicts:
    RIGHT      right numbers, and no more messages and bytes than needed
    WRONG      wrong numbers
    COSTLY     right numbers, but more messages or bytes than needed
    FORBIDDEN  a call of what the exercise is to build
    CRASH      an error, with your own lines only
    HANG       the ranks wait and make no progress, with the line at which each one is
    your turn  you have not written it yet
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ANSWERS = FOLDER / "answers"
sys.path.append(str(FOLDER))  # it is there already, unless `python -m` or -P runs this
sys.path.append(str(FOLDER.parent / "tools"))
# The table of README.md has the exercises in the order of the lessons, in a row for each part.
ROWS = re.findall(r"^\| (.*) \| (\[.*) \|$", (FOLDER / "README.md").read_text("utf-8"), re.M)
PARTS = {part: re.findall(r"\((\w+)\.py\)", links) for part, links in ROWS}
ORDER = sum(PARTS.values(), [])

from watch_ranks.terminal import coloured


def check(file):
    """Check the exercise of a task or of an answer. Its last line calls this.

    A new process does it, because this one has run the learner's file already. In a notebook, this
    process is the notebook's, which must not end.
    """
    sys.stdout.flush()
    words = [sys.executable, str(FOLDER / "check.py"), Path(file).stem, *sys.argv[1:]]
    if "IPython" in sys.modules:
        print(subprocess.run(words, stdout=subprocess.PIPE, text=True).stdout, end="")
    else:
        os.execv(sys.executable, words)


def task_of(name):
    """Return the path of an exercise's task."""
    return FOLDER / f"{name}.py"


def answer_to(name):
    """Return the path of the learner's answer, which may not be there yet."""
    return ANSWERS / f"{name}.py"


def shown(path):
    """Return a path as one can type it, from the working directory."""
    return os.path.relpath(path)


def your_turn(name, file=None):
    """Return what there is to do, in one line. The file is the answer's, or one as it was given."""
    file = file or shown(answer_to(name))
    is_class = re.search(r"^class ", task_of(name).read_text(encoding="utf-8"), re.M)
    return f"your turn: write the {'class' if is_class else 'function'} in {file}"


def begin(name):
    """Copy the task of an exercise to the answers, unless an answer is there.

    Returns whether it was copied.
    """
    try:
        ANSWERS.mkdir(exist_ok=True)
        link = ANSWERS / "check.py"  # an answer that is run imports check from its own folder
        if not link.exists():
            link.symlink_to("../check.py")
        if answer_to(name).exists():
            return False
        shutil.copyfile(task_of(name), answer_to(name))
    except OSError as error:
        sys.exit(f"error: your answers cannot be written to {shown(ANSWERS)}: {error.strerror}")
    return True


def reset(name):
    """Put the task back, and keep the old answer under another name."""
    answer = answer_to(name)
    if answer.exists() and answer.read_bytes() != task_of(name).read_bytes():
        numbered = (ANSWERS / f"{name}-{number}.py" for number in count(1))
        old = next(path for path in numbered if not path.exists())
        answer.rename(old)
        print(f"Your old answer is {shown(old)} now.")
    begin(name)
    print(your_turn(name))


def is_unwritten(name):
    """Return whether an exercise has no answer, or the stub of the task. None of them is run."""
    if not answer_to(name).exists():
        return True
    return answer_to(name).read_bytes() == task_of(name).read_bytes()


def in_colour(line):
    """Return a line with the verdict that it begins with in green or red, on a terminal."""
    line = re.sub(r"^RIGHT\b", coloured("RIGHT", "green"), line)
    wrong = r"^(WRONG|COSTLY|FORBIDDEN|CRASH|HANG)\b"
    return re.sub(wrong, lambda word: coloured(word[0], "red"), line)


def show_all(args):
    """Print the verdict on each answer that is written, and what is next. True: all is right."""
    left = []
    for part, names in PARTS.items():
        print(f"\n{part}")
        for name in names:
            print(f"  {name:<31}", end="", flush=True)
            is_right, lines = (False, ["your turn"])
            if not is_unwritten(name):
                is_right, lines = verdict_on(name, args)
            # Of an answer that has only its first rung, the row tells what is wrong on the second.
            rows = [line for line in lines if not line.startswith("RIGHT")]
            print(in_colour(lines[0] if is_right else rows[0]), flush=True)
            if not is_right:
                left.append(name)
    print(f"\n{len(ORDER) - len(left)} of {len(ORDER)} are right")
    if left:
        print(f"next: python {shown(__file__)} {left[0]}")
    return not left


def show(name, args):
    """Print the verdict on one exercise. Returns whether it is right."""
    if not args.file:
        is_new = begin(name)
        unwritten = is_unwritten(name)
        if is_new or unwritten:
            print(your_turn(name), flush=True)
        if unwritten:
            return False
    is_right, lines = verdict_on(name, args)
    if lines == ["your turn"]:
        lines = [your_turn(name, args.file)]
    elif not is_right:
        lines.append("For a hint, add --hint 1.")
    print(*map(in_colour, lines), sep="\n", flush=True)
    return is_right


def verdict_on(name, args):
    """Judge the answer to an exercise. Returns whether it is right, and the verdict's lines."""
    from judging.judge import SECONDS, judge  # imports torch, which takes long

    file = args.file or answer_to(name)
    options = {"sizes": args.ranks, "with_trace": args.trace}
    return judge(name, file, seconds=args.seconds or SECONDS, **options)


def main():
    """Read the flags and do what they ask. Exits with status 0 if everything is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("exercise", nargs="?", help="its name or its file; none: all exercises")
    add("--trace", action="store_true", help="show who sends what to whom, step by step")
    add("--hint", type=int, choices=[1, 2, 3], help="a direction, the API, the shape of the answer")
    add("--answer", action="store_true", help="show a solution")
    add("--reset", action="store_true", help="start again with the task; your answer is kept")
    add("--file", help="check the function in another file")
    add("--ranks", type=int, nargs="+", help="check it with these numbers of ranks only")
    add("--seconds", type=float, help="for which the ranks of a case may wait (default: 8)")
    args = parser.parse_args()
    name = Path(args.exercise).stem if args.exercise else None
    if name and name not in ORDER:
        parser.error(f"there is no exercise {name}: choose from {', '.join(ORDER)}")
    if name is None and (args.hint or args.answer or args.reset or args.file):
        parser.error("name an exercise")
    if args.ranks and min(args.ranks) < 1:
        parser.error("--ranks: at least 1")
    if args.hint or args.answer:
        from judging import solution  # its folder sets variables of PyTorch

        print(solution.hint(name, args.hint) if args.hint else solution.answer(name))
        return 0
    if args.reset:
        reset(name)
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signal_number, frame: sys.exit(128 + signal_number))
    try:
        right = show(name, args) if name else show_all(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0 if right else 1


if __name__ == "__main__":
    if sys.stdout:  # it may be closed, or know no letter but ASCII's
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = main()
        print(end="", flush=True)
    except BrokenPipeError:  # the reader has ended, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so Python adds no error
        status = 141  # as if SIGPIPE had ended it
    sys.exit(status)
