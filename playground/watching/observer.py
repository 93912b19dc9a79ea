"""The process beside the ranks of a node: it shows where they are if one of them hangs."""

import contextlib
import fcntl
import json
import linecache
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path


def is_held(path):
    """Return whether the process that has locked a file is still there."""
    with open(path, "r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def read_notes(folder):
    """Return what the ranks of this node have noted, in the order of their ranks."""
    ranks = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # it has ended just now
            notes = json.loads(path.read_text())
            notes["path"] = path
            notes["alive"] = is_held(path.with_suffix(".alive"))
            # A rank that lets no thread of Python run writes no notes.
            silent = time.time() - path.stat().st_mtime
            notes["still"] = max(time.time() - notes["since"], silent)
            ranks.append(notes)
    return sorted(ranks, key=lambda notes: notes["rank"])


def stacks_of(ranks):
    """Return the stack of each rank, as faulthandler writes it to the rank's file at a signal."""
    for notes in ranks:
        notes["stack"] = notes["path"].with_suffix(".stack")
        notes["before"] = notes["stack"].stat().st_size
        if notes["alive"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(notes["pid"], signal.SIGUSR2)
    time.sleep(0.3)
    stacks = []
    for notes in ranks:
        at_interrupt = notes["path"].with_suffix(".interrupted").read_text()
        stacks.append(at_interrupt or notes["stack"].read_text()[notes["before"] :])
    return stacks


def own_lines(stack, script):
    """Return the lines of the script's own files in a stack, and in which function they wait."""
    main_thread = stack.rpartition("most recent call first")[2]  # it is the last one
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', main_thread)
    own = []
    for path, number, function in reversed(frames):
        file = Path(path)
        installed = script.parent not in file.parents or "site-packages" in file.parts
        ours = file.parent.name == "watching" or file.name == "watch.py"
        if installed or ours or function == "<module>":
            continue
        where = function if file == script else f"{function} in {file.name}"
        own.append(f"line {number} in {where}: {linecache.getline(path, int(number)).strip()}")
    if not frames:
        return ["no function of Python: it is ending"]
    path, number, function = frames[0]
    return own[-4:] + [f"now in {function}, {Path(path).name}:{number}"]


def show(ranks, reason, script):
    """Print where the ranks are. Those that are at the same place share their lines."""
    ranks_at = {}
    for notes, stack in zip(ranks, stacks_of(ranks), strict=True):
        lines = own_lines(stack, script)
        if notes["calls"]:
            lines.append("last calls: " + ", ".join(notes["calls"]))
        head = f"rank {notes['rank']} (process {notes['pid']})"
        if not notes["alive"]:
            head += " has ended"
        elif notes["still"] < 1:
            head += " is running"
        else:
            head += f" has been here for {notes['still']:.0f} s"
        ranks_at.setdefault(tuple(lines), []).append(head)
    text = [f"watch: {reason}"]
    for lines, heads in ranks_at.items():
        text += [*heads, *(f"    {line}" for line in lines)]
    print(*text, sep="\n", file=sys.stderr, flush=True)


def main():
    """Look at the notes ten times a second, until no rank is left."""
    folder, script, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
    shown = set()  # which ranks have been shown, and since when they had been at one place
    was_interrupted = False
    while any(is_held(path) for path in [folder / "main", *folder.glob("*.alive")]):
        time.sleep(0.1)
        ranks = read_notes(folder)
        stuck = [notes for notes in ranks if notes["alive"] and notes["still"] > seconds]
        new = [notes for notes in stuck if (notes["path"], notes["since"]) not in shown]
        interrupted = (folder / "ask").exists()
        interrupted |= any(path.stat().st_size for path in folder.glob("*.interrupted"))
        if interrupted and not was_interrupted:
            was_interrupted = True
            show(ranks, "interrupted. The ranks of this node:", script)
            (folder / "ask").unlink(missing_ok=True)
        elif new and not was_interrupted:
            reason = f"no progress of rank {new[0]['rank']} for {new[0]['still']:.0f} s."
            show(ranks, f"{reason} The ranks of this node:", script)
            shown |= {(notes["path"], notes["since"]) for notes in ranks}
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
