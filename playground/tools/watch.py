r"""Shows what the ranks of any script send each other, who waits for whom, and where they hang.

Write watch.py in front of the script, which needs no change:
    python playground/tools/watch.py playground/blocking_p2p.py -g 3
    torchrun --standalone --nproc-per-node 2 playground/tools/watch.py my_script.py --its_flags

The script may start its ranks by mp.spawn, or be started by torchrun, srun or mpirun. On several
nodes, each shows its own ranks. On GPUs it shows no times. (Only --hang was tried on one.)

A script that trains is recorded for a few steps, after the first ones, which are slower. A step
ends when the optimizer has changed the parameters. A script without an optimizer is recorded from
its beginning to its end. Bytes are those of the tensors that a rank passes to its calls.

If a rank stays in one call for 20 seconds, watch.py prints for each rank of this node the line of
the script at which it is, and the last collectives that it has called. It does the same when you
press Ctrl-C. With --hang SECONDS it does nothing else, so the script runs at its full speed.

With --html FILE, it also writes a page in which you can look at each moment of a step.
"""

import argparse
import os
import runpy
import signal
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Behind all other folders, so that nothing of the script's own is hidden.
sys.path[:] = [*(folder for folder in sys.path if folder != str(HERE)), str(HERE)]
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler logs when it starts
# PyTorch reads this when a group is made: its recorder keeps the last 200 calls.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")

import torch.multiprocessing as mp

from watching.advice import advice_on
from watching.inside import Alive, Noted, Rank


def read_flags():
    """Return the flags of this program. All that comes after the script is the script's."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    seconds = "record nothing, and show where the ranks are if one makes no progress so long"
    parser.add_argument("--hang", type=float, metavar="SECONDS", help=seconds)
    page = "show what is recorded in this page, too, over time"
    parser.add_argument("--html", type=Path, metavar="FILE", help=page)
    parser.add_argument("script", type=lambda path: str(Path(path).resolve()))
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the script")
    args = parser.parse_args()
    if not Path(args.script).is_file():
        parser.error(f"there is no script {args.script}")
    if args.html:
        args.html = args.html.expanduser().resolve()
        if args.hang is not None:
            parser.error("with --hang nothing is recorded that --html could show")
        if args.html.is_dir() or not os.access(args.html.parent, os.W_OK):
            parser.error(f"cannot write {args.html}")
    args.recorded = args.script if args.hang is None else None
    if args.recorded and b"profiler.profile(" in Path(args.script).read_bytes():
        print("watch: only for hangs, because this script uses the profiler itself", flush=True)
        args.recorded = None
    return args


def folder_of_node():
    """Return a folder for what the ranks of this node note: the same one in all of them."""
    if "RANK" not in os.environ:
        return Path(tempfile.mkdtemp(prefix="watch-"))
    # The ranks of a node have the same parent, and one that torchrun has restarted has a new count.
    names = [os.getuid(), os.environ.get("MASTER_PORT"), os.getppid()]
    names.append(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    folder = Path(tempfile.gettempdir(), "-".join(["watch", *map(str, names)]))
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        # Another user may have made it, with links in it to files of this user.
        sys.exit(f"watch: others can write to {folder}: remove it, or set TMPDIR to another folder")
    return folder


def start_observer(args, folder):
    """Start the process that shows where the ranks are. It ends when all of them have ended."""
    command = [sys.executable, HERE / "watching" / "show.py", folder, args.script]
    command += [str(args.hang or 20), args.html or ""]
    # In a session of its own, so that Ctrl-C does not end it before it has shown the ranks.
    return subprocess.Popen(command, start_new_session=True)


def note_children(args, folder, rank):
    """Let mp.spawn start ranks that are noted. This process then is no rank, and only waits."""

    def noting(start):
        def start_ranks(fn, *rest, **named):
            rank.stop_recorder(keep=False)
            rank.stop()
            return start(Noted(fn, folder, args.recorded), *rest, **named)

        return start_ranks

    mp.spawn = noting(mp.spawn)
    mp.start_processes = noting(mp.start_processes)


def ask_first(folder):
    """At Ctrl-C, let the observer show where the ranks are, before they are ended.

    Returns what Ctrl-C did before.
    """

    def on_interrupt(number, frame):
        (folder / "ask").touch()
        patience = time.monotonic() + 3
        while (folder / "ask").exists() and time.monotonic() < patience:
            time.sleep(0.05)
        signal.default_int_handler(number, frame)

    return signal.signal(signal.SIGINT, on_interrupt)


def main():
    """Run the script as `python script flags` would, and watch its ranks."""
    args = read_flags()
    folder = folder_of_node()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    by_launcher = "RANK" in os.environ
    # Put back in the end, because a notebook continues after the script.
    starts = mp.spawn, mp.start_processes
    if not by_launcher:
        at_interrupt = ask_first(folder)
    rank = Rank(folder, local_rank, args.recorded)
    if not by_launcher:
        note_children(args, folder, rank)
    if local_rank == 0:
        alive = Alive(folder / "main")  # the observer ends after this process, too
        observer = start_observer(args, folder)
    sys.argv = [args.script, *args.flags]
    sys.path.insert(0, str(Path(args.script).parent))
    try:
        runpy.run_path(args.script, run_name="__main__")
    except Exception as error:
        for row in advice_on("".join(traceback.format_exception_only(error))):
            error.add_note(f"watch: troubleshooting.md on {row}")
        raise
    finally:
        rank.stop_recorder()
        rank.stop()
        if not by_launcher:
            alive.end()
            observer.wait()
            mp.spawn, mp.start_processes = starts
            signal.signal(signal.SIGINT, at_interrupt)


if __name__ == "__main__":
    main()
