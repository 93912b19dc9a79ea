"""Checks the exercises: it runs what you have written on several ranks, and gives a verdict.

    python playground/exercises/check.py                          # all exercises and their state
    python playground/exercises/check.py --next                   # the next one that is not right
    python playground/exercises/check.py ring_all_reduce          # one of them
    python playground/exercises/check.py ring_all_reduce --trace  # who sent what to whom
    python playground/exercises/check.py --watch                  # each time that a file is saved
    python playground/exercises/check.py ring_all_reduce --hint 1 # a direction; 2: the API; 3: the
                                                                  # shape of the answer
    python playground/exercises/check.py ring_all_reduce --answer # a solution, and why it is right

The verdicts:
    RIGHT      right numbers, and no more messages and bytes than needed
    WRONG      wrong numbers
    COSTLY     right numbers, but more messages or bytes than needed
    CRASH      an error, with your own lines only
    HANG       a rank did not finish in time, with the line at which each rank waits
    your turn  you have not written it yet
"""

import argparse
import ast
import importlib
import os
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path

# These are read when torch is imported. Each rank computes in one thread, and none uses a GPU.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from ranks import SECONDS_FOR_A_CASE, World, adopt_orphans, die_with_parent, end_children, fork
from verdicts import Verdict, in_ranks, judge_worlds

FOLDER = Path(__file__).resolve().parent
WORLD_SIZES = (1, 2, 3, 4, 5)
SECONDS = 20  # for all of them together, however many cases there are
SECONDS_FOR_OTHERS = 2  # for the others, when the verdict is known
LINES = 20  # how many lines a verdict has at most
# The exercises in the order of the lessons. A name without a file is not listed.
ORDER = [
    "swap_with_neighbour",
    "tree_broadcast",
    "ring_all_reduce",
    "fault_newer_parameters",
    "reduce_scatter",
    "all_gather",
    "fault_never_returns",
    "average_gradients",
    "fault_different_models",
    "fault_wrong_gradient",
    "fault_mixed_gradients",
    "overlap_gradients",
    "exact_accuracy",
    "fault_same_order",
    "fault_too_many_images",
    "fault_cannot_load",
    "fault_lost_connection",
    "fault_missing_file",
    "save_and_resume",
    "accumulate_gradients",
    "shard_optimizer",
    "gather_layer",
    "seeded_dropout",
    "gpipe",
    "order_1f1b",
    "split_pair",
]


def check(file):
    """Check the exercise in a file. The last line of each exercise calls this.

    A new process does it, because this one has run the learner's file already.
    """
    sys.stdout.flush()
    program = str(FOLDER / "check.py")
    os.execv(sys.executable, [sys.executable, program, Path(file).stem, *sys.argv[1:]])


def exercises():
    """Return the names of all exercises in order. Those that ORDER lacks come last."""
    there = {path.stem for path in (FOLDER / "checks").glob("*.py")}
    known = [name for name in ORDER if name in there]
    return known + sorted(there - set(ORDER))


def shown_path(name):
    """Return the path of an exercise as one can type it, from the working directory."""
    return os.path.relpath(FOLDER / f"{name}.py")


def verdicts_on(name, file=None, function=None, seconds=None, sizes=None):
    """Run an exercise with several numbers of ranks side by side.

    Args:
        name: the exercise.
        file: the file with the answer; None: the exercise's own file.
        function: the name of the answer in it; None: the exercise's own name.
        seconds: for each case.
        sizes: the numbers of ranks; None: all that the exercise has.

    Returns:
        a Verdict for each number of ranks, in order.

    Raises:
        RuntimeError: if the check itself has failed.
    """
    exercise = importlib.import_module(f"checks.{name}")
    file = str(Path(file).resolve()) if file else str(FOLDER / f"{name}.py")
    function = function or getattr(exercise, "NAME", name)
    sizes = sizes or all_sizes(exercise)
    seconds = seconds or getattr(exercise, "SECONDS", SECONDS_FOR_A_CASE)
    verdicts = {}
    judges = {}
    adopt_orphans()
    with tempfile.TemporaryDirectory() as folder:
        try:
            for size in sizes:
                ours, theirs = fork.Pipe(duplex=False)
                worlds = worlds_of(exercise, size, file, function, Path(folder), seconds)
                process = fork.Process(target=judge, args=(exercise, worlds, theirs))
                process.start()
                theirs.close()
                judges[ours] = size, process
            end = time.monotonic() + SECONDS
            while len(verdicts) < len(sizes) and time.monotonic() < end:
                for connection in wait(list(judges), max(0, end - time.monotonic())):
                    size, process = judges.pop(connection)
                    verdicts[size] = verdict_from(connection, process, size)
                if is_decided(sizes, verdicts):
                    end = min(end, time.monotonic() + SECONDS_FOR_OTHERS)
        finally:
            end_children()
    for size in sizes:
        line = f"not all ranks have finished after {SECONDS} seconds"
        ranks = in_ranks([size])
        late = Verdict("HANG", size, ranks=ranks, lines=[line], finished=False)
        verdicts.setdefault(size, late)
    return [verdicts[size] for size in sizes]


def all_sizes(exercise):
    """Return the numbers of ranks with which an exercise is checked."""
    return getattr(exercise, "WORLD_SIZES", WORLD_SIZES)


def verdict_from(connection, process, size):
    """Return the Verdict that a judge has sent. The learner's code may have ended the judge.

    Raises:
        RuntimeError: if the judge has failed by itself. Its traceback has been printed.
    """
    try:
        verdict = connection.recv()
        verdict.world_size = size
        return verdict
    except EOFError:
        process.join()
    if process.exitcode > 0:
        raise RuntimeError("the check itself has failed")
    name = signal.Signals(-process.exitcode).name
    line = f"the process that watches the ranks was ended by {name}"
    return Verdict("CRASH", size, ranks=in_ranks([size]), lines=[line])


def is_decided(sizes, verdicts):
    """Return whether the smallest number of ranks with a fault is known. `verdicts` may lack some.

    The others are then only needed to say for which numbers of ranks an answer is right.
    """
    for size in sizes:
        if size not in verdicts:
            return False
        if verdicts[size].kind != "RIGHT":
            return True
    return False


def worlds_of(exercise, size, file, function, folder, seconds):
    """Return the Worlds of an exercise for one number of ranks: one, unless it has `runs`."""
    place = folder / f"ranks{size}"
    place.mkdir()
    if hasattr(exercise, "runs"):
        runs = exercise.runs(size)
    else:
        runs = [(exercise.run, size)]
    worlds = []
    for run, ranks in runs:
        world = World(
            size=ranks,
            file=file,
            name=function,
            run=run,
            cases=list(exercise.CASES.values()),
            folder=place,
            join=getattr(exercise, "JOIN", True),
            only=getattr(exercise, "ONLY", None),
            instead=getattr(exercise, "INSTEAD", ""),
            seconds=seconds,
        )
        worlds.append(world)
    return worlds


def judge(exercise, worlds, connection):
    """Send the Verdict on one number of ranks. Runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    die_with_parent()
    adopt_orphans()
    connection.send(judge_worlds(exercise, worlds))


def first_fault(verdicts):
    """Return the Verdict to tell: of the smallest number of ranks that is not right, or None."""
    for verdict in verdicts:
        if verdict.kind != "RIGHT":
            return verdict
    return None


def in_words(sizes):
    """Return numbers of ranks as text, such as "1, 2 and 3 ranks"."""
    *others, last = map(str, sizes)
    first = f"{', '.join(others)} and " if others else ""
    return f"{first}{last} rank" if sizes == [1] else f"{first}{last} ranks"


def in_one_line(verdicts):
    """Return the state of an exercise in one line."""
    fault = first_fault(verdicts)
    if fault is None:
        return f"RIGHT with {in_words([verdict.world_size for verdict in verdicts])}"
    if fault.kind == "your turn":
        return "your turn"
    case = f", {fault.case}" if fault.case else ""
    return f"{fault.kind} with {fault.ranks}{case}"


def right_only(exercise, verdicts):
    """Return for which numbers of ranks an answer is right, if not for all; otherwise None."""
    if len(verdicts) < len(all_sizes(exercise)):
        return None
    even_only = getattr(exercise, "EVEN_ONLY", "right for even numbers of ranks only")
    several = [verdict for verdict in verdicts if verdict.world_size > 1 and verdict.finished]
    right = [verdict.world_size for verdict in several if verdict.kind == "RIGHT"]
    even = [verdict.world_size for verdict in several if verdict.world_size % 2 == 0]
    odd = [verdict.world_size for verdict in several if verdict.world_size % 2 == 1]
    if not right or len(right) == len(several):
        return None
    if right == even and len(even) > 1:
        return even_only
    if right == odd and len(odd) > 1:
        return "right for odd numbers of ranks only"
    return f"right with {in_words(right)}"


def report(name, verdicts, with_trace):
    """Return what is printed about an exercise: at most LINES lines."""
    lines = [in_one_line(verdicts)]
    fault = first_fault(verdicts)
    if fault is not None and fault.kind == "your turn":
        return [f"your turn: write the function in {shown_path(name)}"]
    told = fault or verdicts[min(2, len(verdicts) - 1)]
    for line in told.lines:
        lines.append(f"  {line}")
    only = right_only(importlib.import_module(f"checks.{name}"), verdicts)
    if only:
        lines.append(f"  {only}")
    if with_trace:
        heading = "who sends what to whom"
        if any(" calls " in line for line in told.trace):
            heading = "which collectives each rank calls"
        if any(" -> " in line for line in told.trace):
            heading = "who sends what to whom"
        lines.append(f"{heading}, with {told.ranks}:")
        lines += [f"  {line}" for line in told.trace]
    for rank, text in enumerate(told.printed):
        # Gloo of PyTorch 2.9 prints a line when it connects.
        printed = [line for line in text.splitlines() if not line.startswith("[Gloo]")]
        for line in printed[:5]:
            lines.append(f"rank {rank} printed: {line}")
    if len(lines) > LINES:
        lines = [*lines[: LINES - 1], "..."]
    return [line if len(line) <= 200 else f"{line[:197]}..." for line in lines]


def task(name):
    """Return the docstring of an exercise's file."""
    return ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text())) or ""


def state_of(name):
    """Return the state of an exercise in one line. A function that ends as a stub is not run."""
    written = (FOLDER / f"{name}.py").read_text().partition("\n\n\nif __name__")[0]
    if written.rstrip().endswith('raise NotImplementedError("your turn")'):
        return "your turn"
    return in_one_line(verdicts_on(name))


def show_all():
    """Print all exercises and their state. Returns whether all are right."""
    states = []
    for name in exercises():
        state = state_of(name)
        print(f"{name:<24}{state}", flush=True)
        states.append(state)
    right = sum(state.startswith("RIGHT") for state in states)
    print(f"{right} of {len(states)} are right")
    return right == len(states)


def show_next():
    """Print the task of the first exercise that is not right. Returns whether all are right."""
    for name in exercises():
        state = state_of(name)
        if not state.startswith("RIGHT"):
            print(f"{shown_path(name)}: {state}\n\n{task(name)}")
            return False
    print("All exercises are right.")
    return True


def show(name, args):
    """Print the verdict on one exercise. Returns whether it is right."""
    verdicts = verdicts_on(name, args.file, args.function, args.seconds, args.ranks)
    print(*report(name, verdicts, args.trace), sep="\n", flush=True)
    return first_fault(verdicts) is None


def watch(names, args):
    """Check each exercise whenever its file is saved, until Ctrl-C."""
    print("Save an exercise to have it checked. Ctrl-C ends this.", flush=True)
    seen = {name: (FOLDER / f"{name}.py").stat().st_mtime for name in names}
    while True:
        for name in names:
            path = FOLDER / f"{name}.py"
            # While an editor saves a file, it may be missing for a moment.
            saved = path.stat().st_mtime if path.exists() else seen[name]
            if saved != seen[name]:
                seen[name] = saved
                print(f"\n{name}, saved at {time.strftime('%H:%M:%S', time.localtime(saved))}")
                show(name, args)
        time.sleep(0.3)


def main():
    """Read the flags and do what they ask. Exits with status 0 if everything is right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("exercise", nargs="?", help="its name or its file; none: all exercises")
    add("--next", action="store_true", help="show the next exercise that is not right")
    add("--watch", action="store_true", help="check an exercise whenever its file is saved")
    add("--trace", action="store_true", help="show who sends what to whom, step by step")
    add("--hint", type=int, choices=[1, 2, 3], help="a direction, the API, the shape of the answer")
    add("--answer", action="store_true", help="show a solution")
    add("--file", help="check a function in another file")
    add("--function", help="the name of this function")
    add("--ranks", type=int, nargs="+", help="check it with these numbers of ranks only")
    add("--seconds", type=float, help=f"time for each case (default: {SECONDS_FOR_A_CASE})")
    args = parser.parse_args()
    name = Path(args.exercise).stem if args.exercise else None
    if name and name not in exercises():
        parser.error(f"there is no exercise {name}: choose from {', '.join(exercises())}")
    if name is None and (args.hint or args.answer or args.file):
        parser.error("name an exercise")
    if args.ranks and min(args.ranks) < 1:
        parser.error("--ranks: at least 1")
    if args.hint:
        print(importlib.import_module(f"checks.{name}").HINTS[args.hint - 1])
        return 0
    if args.answer:
        print((FOLDER / "solutions" / f"{name}.py").read_text(), end="")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signal_number, frame: sys.exit(128 + signal_number))
    try:
        if args.watch:
            watch([name] if name else exercises(), args)
        if name:
            right = show(name, args)
        elif args.next:
            right = show_next()
        else:
            right = show_all()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
