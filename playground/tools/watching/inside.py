"""What runs in a rank: it notes where the rank is, and what it has called last."""

import contextlib
import faulthandler
import fcntl
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from watching.record import Recorder


class Alive:
    """A lock on a file. The system releases it when this process ends, in whatever way.

    Args:
        path: of the file, which is made.
    """

    def __init__(self, path):
        self.file = open(path, "w")  # noqa: SIM115, it stays open
        fcntl.lockf(self.file, fcntl.LOCK_EX)

    def end(self):
        """Release the lock."""
        self.file.close()


class Rank(threading.Thread):
    """A thread that notes where the main thread of this process is.

    It writes a file twice a second: since when the main thread has been at one place, and the last
    calls of the recorder. At a signal, faulthandler writes the stack to another file, even if the
    main thread waits in C++, or does not let other threads of Python run.

    Args:
        folder: of all files.
        index: number of this rank on its node, which names its files.
        script: its path, if a few of its steps are to be recorded, too.
    """

    def __init__(self, folder, index, script=None):
        super().__init__(daemon=True)
        self.recorder = Recorder(script, Path(folder, f"{index}.record")) if script else None
        self.notes = Path(folder, f"{index}.json")
        self.rank = int(os.environ.get("RANK", index))
        self.place = None
        self.since = time.time()
        self.calls = []
        self.failed = False  # whether an error of Python ends it
        self.stopped = threading.Event()
        self.alive = Alive(Path(folder, f"{index}.alive"))
        self.stack = open(Path(folder, f"{index}.stack"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, self.stack)
        # Afterwards the signal does what it would have done.
        self.interrupted = open(Path(folder, f"{index}.interrupted"), "w")  # noqa: SIM115
        faulthandler.register(signal.SIGINT, self.interrupted, chain=True)
        self.write()
        self.start()

    def run(self):
        """Note where the main thread is until this process ends."""
        looked = 0
        while not self.stopped.wait(0.001 if self.recorder and self.recorder.profiler else 0.1):
            frame = sys._current_frames().get(threading.main_thread().ident)
            if self.recorder:
                self.recorder.note_line(frame)
            if time.time() - looked > 0.1:
                looked = time.time()
                self.note(place_of(frame))
            del frame  # it would keep what the script has deleted, such as DDP

    def note(self, place):
        """Note since when the main thread has been at one place, and its last calls."""
        if place != self.place:
            self.place = place
            self.since = time.time()
            self.calls = []
        elif time.time() - self.since > 1:
            calls = last_calls()
            if self.calls and calls != self.calls:  # a loop that is always met in one line
                self.since = time.time()
            self.calls = calls
        if time.time() - self.written > 0.5:
            self.write()

    def write(self):
        """Write what is known of this rank, whole or not at all."""
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank()
        notes = {"pid": os.getpid(), "rank": self.rank, "since": self.since, "calls": self.calls}
        notes["failed"] = self.failed
        part = Path(f"{self.notes}.part")
        # The observer may have removed the folder, because it saw the end of the last rank.
        with contextlib.suppress(FileNotFoundError):
            part.write_text(json.dumps(notes))
            part.replace(self.notes)
        self.written = time.time()

    def stop_recorder(self, keep=True):
        """Write what is recorded, because the script has ended, or forget it."""
        if self.recorder:
            self.recorder.stop(keep)

    def stop(self):
        """End the notes, because the script has ended, or because other processes are the ranks."""
        if not self.stopped.is_set():
            self.stopped.set()
            self.join()
            faulthandler.unregister(signal.SIGINT)
            faulthandler.unregister(signal.SIGUSR2)
            self.notes.unlink(missing_ok=True)
            self.alive.end()


class Noted:
    """What mp.spawn gets in place of a function: it calls the function, and notes the rank."""

    def __init__(self, function, *places):
        self.function = function
        self.places = places  # the folder, and the script

    def __call__(self, index, *rest):
        """Run the function as a rank."""
        folder, script = self.places
        rank = Rank(folder, index, script)
        try:
            self.function(index, *rest)
        except BaseException:
            rank.failed = True
            rank.write()
            raise
        finally:
            rank.stop_recorder()
        rank.stop()


def place_of(frame):
    """Return the code and the instruction of each function that a thread is in."""
    place = []
    while frame:
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return place


def group_of(name, description):
    """Return what tells a group from the default one: its description, or its ranks."""
    if description == "default_pg":
        return ""
    if description != "undefined":
        return description  # such as mesh_tp
    try:
        return f"of ranks {dist.get_process_group_ranks(_resolve_process_group(name))}"
    except RuntimeError:
        return "of a group that is gone"


def last_calls():
    """Return the last three collectives of this rank: their number, group, name, shapes and state.

    PyTorch's recorder keeps them, but no public function reads it. That of gloo does not keep send
    and recv.
    """
    read = torch._C._distributed_c10d
    if dist.is_initialized() and "nccl" in dist.get_backend():
        recorded = json.loads(read._dump_nccl_trace_json())
    else:
        recorded = json.loads(read._dump_fr_trace_json())
    calls = []
    for entry in recorded.get("entries", [])[-3:]:
        shapes = ", ".join("x".join(map(str, shape)) for shape in entry["input_sizes"])
        words = [
            f"#{entry['collective_seq_id']}",
            group_of(*entry["process_group"]),
            entry["profiling_name"].rpartition(":")[2],
            f"({shapes})" if entry["input_sizes"] else "",  # a barrier has no tensor
            "" if entry["retired"] else "not done",
        ]
        calls.append(" ".join(word for word in words if word))
    return calls
