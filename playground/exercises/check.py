"""Checks the exercises: it runs what you have written on several ranks, and gives a verdict.

    python playground/exercises/check.py                          # all exercises and their state
    python playground/exercises/check.py ring_all_reduce          # one of them
    python playground/exercises/check.py ring_all_reduce --trace  # who sent what to whom
    python playground/exercises/check.py --watch                  # each time that you save a file
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
    CRASH      an error, with your own lines only
    HANG       the ranks wait and make no progress, with the line at which each one is
    your turn  you have not written it yet

The list runs only the answers that have changed, because answers/verdicts.json keeps the verdicts.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from itertools import count
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ANSWERS = FOLDER / "answers"
KEPT = ANSWERS / "verdicts.json"
JUDGING = FOLDER / "judging"
sys.path.append(str(FOLDER))  # it is there already, unless `python -m` or -P runs this
sys.path.append(str(FOLDER.parent / "tools"))
# The table of README.md has the exercises in the order of the lessons, in a row for each part.
ROWS = re.findall(r"^\| (.*) \| (\[.*) \|$", (FOLDER / "README.md").read_text("utf-8"), re.M)
PARTS = {part: re.findall(r"\((\w+)\.py\)", links) for part, links in ROWS}
ORDER = sum(PARTS.values(), [])

from instruments.terminal import coloured


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


def is_program(name):
    """Return whether a task is a program to repair, rather than a stub to write."""
    return 'NotImplementedError("your turn")' not in task_of(name).read_text(encoding="utf-8")


def your_turn(name, file=None):
    """Return what there is to do, in one line. The file is the answer's, or one as it was given."""
    file = file or shown(answer_to(name))
    if is_program(name):
        return f"your turn: repair the function in {file}"
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
    same = answer_to(name).read_bytes() == task_of(name).read_bytes()
    return same and not is_program(name)


def key_of(name):
    """Return a text that differs when an answer needs a new verdict."""
    files = [answer_to(name), task_of(name), JUDGING / "checks" / f"{name}.py"]
    files += sorted(JUDGING.glob("*.py"))
    files += sorted((FOLDER.parent / "tools" / "instruments").glob("*.py"))
    digest = hashlib.sha256(version("torch").encode())
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return f"{name} {digest.hexdigest()}"


def kept_states():
    """Return the states that are kept, by key_of. A damaged file is as good as none."""
    try:
        kept = json.loads(KEPT.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def keep(name, key, state):
    """Keep the state of an exercise, and forget its former one, if that can be written."""
    kept = {other: each for other, each in kept_states().items() if other.split()[0] != name}
    kept[key] = state
    unfinished = KEPT.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        unfinished.write_text(json.dumps(kept, indent=1))
        os.replace(unfinished, KEPT)  # another check may read it at any time


def state_of(name):
    """Return the state of an exercise in one line. It is judged only if no state is kept."""
    if is_unwritten(name):
        return "your turn"
    key = key_of(name)
    state = kept_states().get(key)
    if not isinstance(state, str):
        from judging import judge  # imports torch, which takes longer than all else here

        state = judge.judge(name, answer_to(name)).in_one_line()
        keep(name, key, state)
    return state


def in_colour(line):
    """Return a line with its verdict in green or red, on a terminal."""
    line = re.sub(r"\bRIGHT\b", coloured("RIGHT", "green"), line, count=1)
    return re.sub(r"\b(WRONG|COSTLY|CRASH|HANG)\b", lambda word: coloured(word[0], "red"), line)


def show_all():
    """Print all exercises and their state, and what is next. Returns whether all are right."""
    left = []
    for part, names in PARTS.items():
        print(f"\n{part}")
        for name in names:
            state = state_of(name)
            print(f"  {name:<31}{in_colour(state)}", flush=True)
            if not state.startswith("RIGHT"):
                left.append(name)
    print(f"\n{len(ORDER) - len(left)} of {len(ORDER)} are right")
    if left:
        print(f"next: python {shown(__file__)} {left[0]}")
    return not left


def after(name):
    """Return the exercise to do after one: the next that is not known to be right, or None."""
    kept = kept_states()
    later = ORDER[ORDER.index(name) + 1 :]
    for other in later + ORDER:
        known = kept.get(key_of(other), "") if answer_to(other).exists() else ""
        if other != name and not known.startswith("RIGHT"):
            return other
    return None


def show(name, args):
    """Print the verdict on one exercise. Returns whether it is right."""
    if not args.file:
        is_new = begin(name)
        unwritten = is_unwritten(name)
        if is_new or unwritten:
            print(your_turn(name), flush=True)
        if unwritten:
            return False
    from judging import judge  # see state_of

    file = args.file or answer_to(name)
    key = None
    if not (args.file or args.seconds or args.ranks):
        key = key_of(name)
    judged = judge.judge(name, file, seconds=args.seconds, sizes=args.ranks)
    if key:
        keep(name, key, judged.in_one_line())
    lines = judged.report(args.trace) or [your_turn(name, args.file)]
    is_right = judged.fault is None
    if is_right and key and after(name):
        lines.append(f"next: python {shown(__file__)} {after(name)}")
    print(in_colour(lines[0]), *lines[1:], sep="\n", flush=True)
    return is_right


def watch(names, args):
    """Check each exercise whenever its answer is saved, until Ctrl-C."""
    seen = {name: saved_at(name) for name in names}
    print(f"Save a file in {shown(ANSWERS)} to have it checked. Ctrl-C ends this.", flush=True)
    while True:
        for name in names:
            saved = saved_at(name)
            # While an editor saves a file, it may be missing for a moment.
            if saved is not None and saved != seen[name]:
                seen[name] = saved
                print(f"\n{name}, saved at {time.strftime('%H:%M:%S', time.localtime(saved))}")
                show(name, args)
        time.sleep(0.3)


def saved_at(name):
    """Return when an answer was saved, in seconds since 1970; None: there is none."""
    try:
        return answer_to(name).stat().st_mtime
    except FileNotFoundError:
        return None


def main():
    """Read the flags and do what they ask. Exits with status 0 if everything is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("exercise", nargs="?", help="its name or its file; none: all exercises")
    add("--watch", action="store_true", help="check an exercise whenever you save your answer")
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
        if args.watch:
            watch([name] if name else ORDER, args)
        if name:
            right = show(name, args)
        else:
            right = show_all()
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
