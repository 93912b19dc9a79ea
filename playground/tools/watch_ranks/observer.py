"""The process beside the ranks of a node: it shows where they hang, or what they have recorded."""

import contextlib
import fcntl
import json
import linecache
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__" and sys.argv[-1] != "detached":
    # See watch.py: this process ends at once, and the observer is no child of the script.
    subprocess.Popen([sys.executable, *sys.argv, "detached"], close_fds=False)
    os._exit(0)

# In place of this folder, whose modules have short names.
sys.path[:] = [*sys.path[1:], str(Path(__file__).resolve().parents[1])]

import psutil

from watch_ranks.anywhere import ASK, is_own
from watch_ranks.nccl import show_findings
from watch_ranks.report import show_records
from watch_ranks.terminal import ranks_in_words


def is_held(path):
    """Return whether the process that has locked a file is still there."""
    with open(path, "r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def lives(path):
    """Return whether the system knows the process that has written these notes."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(int(path.stem))
        older = process.create_time() < path.stat().st_mtime + 1  # otherwise it is another one
        return older and process.status() != psutil.STATUS_ZOMBIE
    return False


def read_notes(folder, loose):
    """Return what the processes of this node have noted: the ranks, or all, if there is no rank.

    A process that lives without its lock has called exec, or has closed all files. It is not asked
    for its stack. `loose` counts its sights: one that ends has no lock for a moment, too.
    """
    found = []
    for path in folder.glob("*.json"):
        held = is_held(path.with_suffix(".stack"))  # before the notes, which it may write last
        there = held or lives(path)
        loose[path] = 0 if held else loose[path] + there
        with contextlib.suppress(FileNotFoundError):  # it has given up just now
            notes = json.loads(path.read_text())
            # A rank that lets no thread of Python run writes no notes. On a busy machine they may
            # only be late.
            written = path.stat().st_mtime
            late = time.time() - written > 5
            notes["age"] = time.time() - written
            notes["still"] = (time.time() if late else written) - notes["since"]
            notes["lost"] = loose[path] > 10 and not notes["end"]
            notes |= {"path": path, "alive": held and not notes["end"]}
            notes["there"] = there and not notes["end"]
            notes["gone"] = not (there or notes["end"] or notes["lost"])
            # At SIGTERM, faulthandler writes to the other file, later than the rank itself.
            notes["at"] = max(written, path.with_suffix(".stack").stat().st_mtime)
            found.append(notes)
    # A launcher may start one process on a node, which starts the ranks.
    parents = {notes["parent"] for notes in found if notes["called"]}
    ranks = [x for x in found if x["called"] or x["joined"] and x["pid"] not in parents] or found
    return sorted(ranks, key=lambda notes: (notes["rank"] is None, notes["rank"], notes["pid"]))


def ask_stacks(ranks):
    """Let each rank that is there write its stack, in place of what it has noted last."""
    for notes in ranks:
        notes["file"] = notes["path"].with_suffix(".stack")
        notes["before"] = notes["file"].stat().st_size
        if notes["alive"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(notes["pid"], ASK)
    asked = missing = [notes for notes in ranks if notes["alive"]]
    end = time.time() + 5
    while missing and time.time() < end:  # a rank that Ctrl-Z has stopped writes nothing
        time.sleep(0.1)
        missing = []
        for notes in asked:
            at_interrupt = notes["path"].with_suffix(".interrupted").read_text()
            stack = at_interrupt or notes["file"].read_text()[notes["before"] :]
            notes["stack"] = stack or notes["stack"]
            # The main thread stands last, and a long stack ends with dots.
            if not re.search(r"(in <module>|\.\.\.|<no Python frame>)\n$", stack):
                missing.append(notes)
    for notes in ranks:
        stack = notes["file"].read_text()
        _, crashed, crash = stack.partition("Fatal Python error: ")
        if notes["gone"] and crashed:
            notes["crash"], _, notes["stack"] = crash.partition("\n")
        elif notes["gone"] and notes["file"].stat().st_mtime > notes["path"].stat().st_mtime:
            notes["stack"] = stack or notes["stack"]


def own_lines(stack, script):
    """Return the lines of the script's own files in a stack, and in which function they wait."""
    stack = stack.partition("Current thread's C stack")[0]  # which Python 3.14 adds
    # faulthandler has \xfc for a letter that is not in ASCII.
    escapes = r"\\(x[\da-f]{2}|u[\da-f]{4}|U[\da-f]{8})"
    stack = re.sub(escapes, lambda found: chr(int(found[1][1:], 16)), stack)
    # The main thread is the last one. Of a thread that was asked twice, the last answer counts.
    _, *parts = re.split(r"hread (0x\w+).*most recent call first", stack)
    text_of = dict(zip(parts[::2], parts[1::2], strict=True))
    frames = frames_in(text_of.pop(parts[-2]) if parts else stack)
    if not frames:
        return ["no function of Python: it is ending, or Ctrl-Z has stopped it"]
    threads = [frames_in(text) for text in text_of.values()]
    own, *others = [lines_of(each, script) for each in (frames, *threads)]
    frames = [frame for frame in frames if Path(frame[0]).parent != Path(__file__).parent] or frames
    path, number, function = frames[0]
    # The call of main() is of interest only to a script that has no function.
    own = [line for line in own if " in <module>: " not in line or line == own[-1]]
    own = own[-4:] + [f"now in {function}, {Path(path).name}:{number}"]
    for number, lines in enumerate(others):
        calls = [frame for frame in threads[number] if frame[0].endswith("distributed_c10d.py")]
        if calls and not lines:  # one of PyTorch's own, such as that of dcp.async_save
            others[number] = [f"in {calls[0][2]}, distributed_c10d.py:{calls[0][1]}"]
    return own + [f"another thread: {lines[-1]}" for lines in others if lines][-4:]


def frames_in(text):
    """Return (path, line, function) of the frames of a thread, the innermost one first."""
    frames = re.findall(r'File "(.*)", line (\d+) in (.*)', text)
    # What is outside of a process of multiprocessing has started it.
    outer = [number for number, frame in enumerate(frames) if frame[2] == "_bootstrap"]
    return frames[: min(outer, default=None)]


def lines_of(frames, script):
    """Return the lines of the script's own files among frames, the innermost one last."""
    own = []
    for path, number, function in reversed(frames):
        if is_own(path, script):
            where = function if path == script else f"{function} in {Path(path).name}"
            own.append(f"line {number} in {where}: {linecache.getline(path, int(number)).strip()}")
    return own


def show_ranks(ranks, reason=""):
    """Print where the ranks are. Those that are at the same place share their lines.

    If there is no other reason, it is the first that failed: one that was ended, or exits.
    """
    ranks_at = {}
    ask_stacks(ranks)
    ranks = sorted(ranks, key=lambda notes: "crash" not in notes)
    if not reason:
        # The others have errors because of it, or the launcher has ended them.
        first = min(those_that_failed(ranks), key=lambda x: ("crash" not in x, x["at"]))
        reason = f"{name_of(first).partition(' (')[0]} did not end well."
    for notes in ranks:
        lines = []
        if notes["alive"] or notes["stack"]:
            lines = own_lines(notes["stack"], notes["script"])
        if notes["calls"]:
            is_old = notes["gone"] or notes["alive"] and notes["age"] > 2
            seen = "last noted calls" if is_old else "last calls"
            if notes["end"] not in ("", "well"):
                seen += " (the last one may have failed)"
            lines.append(f"{seen}: {', '.join(notes['calls'])}")
        if "crash" in notes:
            state = f"has crashed: {notes['crash']}"
        elif notes["lost"]:
            state = "has closed the files of this tool, or has become another program"
            lines = []
        elif notes["gone"]:
            state = "has ended without a word, as if it was killed. It was last seen here:"
        elif notes["end"] == "well":
            state = "has ended"
            lines = lines[-1:] if notes["calls"] else []
        elif notes["end"]:
            state = textwrap.shorten(f"has ended by {notes['end']}", 150)
        elif notes["still"] < 1:
            state = "is running"
        else:
            state = f"has been here for {notes['still']:.0f} s"
        ranks_at.setdefault(tuple(lines), []).append(f"{name_of(notes)} {state}")
    text = [f"watch: {reason} The ranks of this node:"]
    for lines, heads in ranks_at.items():
        text += [*heads, *(f"    {line}" for line in lines)]
    absent = {*range(max(notes["size"] for notes in ranks))} - {notes["rank"] for notes in ranks}
    if absent:
        which = ranks_in_words(sorted(absent)) if len(absent) < 9 else f"{len(absent)} ranks"
        why = "on another node, not yet at init_process_group, or started in another way"
        text.append(f"(Not seen: {which}: {why}.)")
    print(*text, sep="\n", file=sys.stderr, flush=True)


def waits(notes):
    """Return whether a process has ended, or is no rank and waits for those that it has started."""
    if notes["alive"] and not notes["called"]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(notes["pid"]).children())
    return not notes["alive"]


def those_that_failed(ranks):
    """Return the ranks that did not end well."""
    return [notes for notes in ranks if notes["gone"] or notes["end"] not in ("", "well")]


def those_that_exit(ranks):
    """Return the ranks that end by an exit, which says nothing by itself."""
    return [notes for notes in ranks if notes["called"] and notes["end"].startswith("SystemExit")]


def name_of(notes):
    """Return what a process is called."""
    if notes["rank"] is None:
        return f"process {notes['pid']}"
    return f"rank {notes['rank']} (process {notes['pid']})"


def main():
    """Look at the notes ten times a second, until no rank is left."""
    if sys.stdout:  # it may be closed, and a line of the script may not be in ASCII
        sys.stdout.reconfigure(errors="backslashreplace")
    folder, seconds, trace, record = Path(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:5]
    loose = Counter()
    joined = False  # whether a process was seen that has joined a group
    why = ""  # no steps are recorded
    shown = set()  # which ranks have been shown, and since when they had been at one place
    was_interrupted = was_told = was_recorded = False
    failed_at = None
    going = True
    while going:
        time.sleep(0.1)
        # After the last one has ended it looks once more: all may have ended since it looked last.
        going = any(is_held(path) for path in [folder / "main", *folder.glob("*.stack")])
        ranks = read_notes(folder, loose)
        going |= any(notes["there"] for notes in ranks)
        joined |= any(notes["called"] for notes in ranks)
        why = next((notes["why"] for notes in ranks if notes["why"]), why)
        stuck = [notes for notes in ranks if notes["still"] > seconds and not waits(notes)]
        new = [notes for notes in stuck if (notes["path"], notes["since"]) not in shown]
        # A rank that has just reached its place has not noted its last calls yet.
        moving = any(notes["alive"] and notes["still"] < 2 for notes in ranks)
        interrupted = (folder / "ask").exists()
        interrupted |= any(path.stat().st_size for path in folder.glob("*.interrupted"))
        if interrupted and not was_interrupted:
            was_interrupted = True
            show_ranks(ranks, "interrupted.")
            (folder / "ask").unlink(missing_ok=True)
        elif new and not was_interrupted and (not moving or new[0]["still"] > seconds + 3):
            who = name_of(new[0]).partition(" (")[0]
            show_ranks(ranks, f"no progress of {who} for {new[0]['still']:.0f} s.")
            if record == "messages" and not shown:
                show_findings(folder.glob("*.calls"), hangs=True)
            shown |= {(notes["path"], notes["since"]) for notes in ranks}
        failed = those_that_failed(ranks)
        failed_at = failed_at or (time.time() if failed else None)
        # The others may have an error because of it. If all have one, each has told of it.
        waiting = any(notes["alive"] for notes in ranks) and time.time() < (failed_at or 0) + 3
        silent = those_that_exit(ranks) or any(x["gone"] or x["end"] == "well" for x in ranks)
        if failed and silent and not waiting and not was_told and not was_interrupted:
            was_told = True
            if any((notes["path"], notes["since"]) not in shown for notes in ranks):
                show_ranks(ranks)
        records = list(folder.glob("*.record"))
        if records and not was_recorded and (len(records) == len(ranks) or not going):
            was_recorded = True
            show_records(records, trace, not failed)
    calls = list(folder.glob("*.calls"))
    if calls and not shown:
        show_findings(calls)
    if record and not failed and not records and not calls:
        lack = "its ranks have noted nothing" if joined else "it takes a process that joins a group"
        print(f"watch: nothing is recorded: {why or lack}.", flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without a word
    main()
