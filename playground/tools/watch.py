r"""Shows what the ranks of any script send each other, who waits for whom, and where they hang.

Write watch.py in front of the script, which needs no change. (README.md beside it has how to
install it. Then it is `watch-ranks`, and `-m watch_ranks` behind torchrun.)
    python playground/tools/watch.py playground/blocking_p2p.py -g 3
    torchrun --standalone --nproc-per-node 2 playground/tools/watch.py my_script.py --its_flags

Each process that calls init_process_group is a rank, however it was started: by torchrun, srun or
mpirun in front of watch.py, or by the script itself (mp.spawn, Process, fork, subprocesses). It may
be a module: watch.py -m package.module, and so watch.py -m torch.distributed.run ... works, too. On
several nodes, each shows its own ranks. On GPUs it shows no times. (Only --hang was tried on one.)

A script that trains is recorded for a few steps, after the first ones, which are slower. A step
ends when the (first) optimizer has changed the parameters. A script without an optimizer is
recorded from init_process_group to its end, at most for 10,000 operations. Bytes are those of the
tensors that a rank passes to its calls. A call's line is the innermost one of your own files.

If a rank stays in one call for 20 seconds, watch.py prints for each rank of this node the lines of
your files at which it is, and the last collectives that it has called. It does the same when a rank
crashes or is killed, and when you press Ctrl-C. With --hang SECONDS it does nothing else, so the
script runs at its full speed.

With --trace FILE, it also writes what the ranks did over time, for ui.perfetto.dev.

With --nccl, it tells at which lines a script that runs on CPUs may hang, or compute wrong numbers,
on GPUs with NCCL, whose rules differ from gloo's. It replays the messages, at most 10,000 of each
rank. (It sees no streams or threads of your own, no reduce ops, not where Python reads numbers, and
not whether messages of several groups hinder each other. It was never tried beside NCCL itself.)
"""

import argparse
import atexit
import contextlib
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Behind all other folders, so that nothing of the script's own is hidden.
sys.path[:] = [*(folder for folder in sys.path if folder != str(HERE)), str(HERE)]
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise the profiler logs when it starts
# PyTorch reads this when a group is made: its recorder keeps the last 200 calls.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "200")

ends = []  # the ends of pipes: to be read when the observer has ended, and by which process
# Python calls the handlers in the opposite order. So those that PyTorch's import adds come first:
# they end ranks that the script has left behind.
atexit.register(lambda: [os.read(end, 1) for end, pid in ends if pid == os.getpid()])

alone = sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
if alone:
    print("watch: loading PyTorch ...", end="\r", file=sys.stderr, flush=True)

from watch_ranks.advice import advice_on
from watch_ranks.anywhere import PACKAGE, add_script, launched, path_of, run_with
from watch_ranks.inside import Rank, unlock

if alone:
    print(" " * 26, end="\r", file=sys.stderr, flush=True)

# How launchers name a process' number on its node.
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def read_flags():
    """Return the flags of this program. All that comes after the script is the script's."""
    form = argparse.RawDescriptionHelpFormatter
    name = Path(sys.argv[0]).name.replace("__main__.py", "watch_ranks")
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=form)
    seconds = "record nothing, and show where the ranks are if one makes no progress so long"
    parser.add_argument("--hang", type=float, metavar="SECONDS", help=seconds)
    over_time = "write what is recorded to this file, too, for ui.perfetto.dev or vizviewer"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=over_time)
    replay = "instead, tell where the script may hang on GPUs, with NCCL"
    parser.add_argument("--nccl", action="store_true", help=replay)
    add_script(parser)
    args = parser.parse_args()
    args.path = path_of(args.script, args.is_module)
    if not args.path.is_file():
        parser.error(f"there is no script {args.path}")
    if args.trace:
        args.trace = args.trace.expanduser().resolve()
        if args.hang is not None or args.nccl:
            parser.error("with --hang or --nccl, nothing is recorded that --trace could show")
        if args.trace.is_dir() or not os.access(args.trace.parent, os.W_OK):
            parser.error(f"cannot write {args.trace}")
    args.record = "messages" if args.nccl else "steps" if args.hang is None else ""
    return args


def folder_of_node():
    """Return a folder for what the ranks of this node note: the same one in all of them."""
    if launched() is None:
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
    """Start the process that shows where the ranks are: in the first process of this node.

    It ends when this process and all ranks have ended. Returns the file whose lock it sees.
    """
    held = open(folder / "main", "w")  # noqa: SIM115, it stays open
    local_ranks = [os.environ[name] for name in LOCAL_RANK if name in os.environ]
    if launched() and local_ranks[:1] > ["0"]:
        return held
    try:
        fcntl.lockf(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # no local rank is known, and another process was faster
        return held
    command = [sys.executable, PACKAGE / "observer.py", folder]
    command += [str(args.hang or 20), args.trace or "", args.record]
    read_end, write_end = os.pipe()
    # In a session of its own, so that Ctrl-C does not end it before it has shown the ranks. It is
    # no child of the script, which may wait for all its children: what starts here ends at once.
    subprocess.Popen(command, start_new_session=True, pass_fds=[write_end]).wait()
    os.close(write_end)
    if not launched():
        ends.append((read_end, os.getpid()))
    return held


def ask_first(folder):
    """At Ctrl-C, let the observer show where the ranks are, before they are ended."""

    def on_interrupt(number, frame):
        with contextlib.suppress(OSError):  # the observer has ended
            (folder / "ask").touch()
        patience = time.monotonic() + 3
        while (folder / "ask").exists() and time.monotonic() < patience:
            time.sleep(0.05)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, on_interrupt)


def main():
    """Run the script as `python script flags` would, and watch its ranks."""
    args = read_flags()
    folder = folder_of_node()
    at_interrupt = signal.getsignal(signal.SIGINT)
    if launched() is None and at_interrupt is signal.default_int_handler:
        ask_first(folder)
    rank = Rank(folder, args.record)
    held = start_observer(args, folder)
    settings = str(folder), args.record
    before = threading.enumerate()
    try:
        run_with("watch_ranks.inside", settings, args.script, args.is_module, args.flags)
    except Exception as error:
        for row in advice_on("".join(traceback.format_exception_only(error))):
            error.add_note(f"watch: troubleshooting.md on {row}")
        raise
    finally:
        left = [each for each in threading.enumerate() if not each.daemon and each not in before]
        if sys.exc_info()[1] or not left or hasattr(sys, "ps1"):
            rank.stop()
            unlock(held)
        rank.held = held  # Python waits for its threads, and ends the rank after them
        signal.signal(signal.SIGINT, at_interrupt)


if __name__ == "__main__":
    main()
