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
import traceback
from multiprocessing import util
from pathlib import Path

import torch
import torch.distributed as dist

from watch_ranks.anywhere import ASK, given_up, harmless, launched, running
from watch_ranks.calls import Calls
from watch_ranks.messages import last_calls
from watch_ranks.record import Recorder


class Rank(threading.Thread):
    """A thread that notes where the main thread of this process is.

    It writes a file twice a second: where the main thread is, since when, and the last calls of the
    recorder. At a signal, faulthandler writes the stack to another file, even if the main thread
    waits in C++, or does not let other threads of Python run; and if C++ ends the process, too.
    That file is locked until this process ends, in whatever way.

    Args:
        folder: of all files. The number of the process names them.
        record: "steps": a few are to be recorded, too. "messages": all of them. "": nothing.
    """

    here = None  # that of this process

    def __init__(self, folder, record):
        super().__init__(daemon=True)
        Rank.here = self
        path = str(Path(folder, str(os.getpid())))
        self.recorder = Recorder(f"{path}.record") if record == "steps" else None
        if record == "messages":
            self.recorder = Calls(f"{path}.calls")
        self.path = Path(f"{path}.json")
        rank, size = launched() or (None, 0)
        self.notes = {"pid": os.getpid(), "rank": rank, "size": size, "joined": size > 0}
        self.notes |= {"parent": os.getppid(), "called": False}
        self.notes |= {"since": time.time(), "calls": [], "stack": "", "end": "", "why": ""}
        self.notes["script"] = running()
        self.place = None
        self.earlier = getattr(sys, "last_value", None)  # an error of an earlier cell of a notebook
        self.stopped = threading.Event()
        self.stack = open(f"{path}.stack", "w")  # noqa: SIM115, it stays open
        fcntl.lockf(self.stack, fcntl.LOCK_EX)
        faulthandler.register(ASK, self.stack)
        self.sees_crashes = not faulthandler.is_enabled()  # otherwise the script's user reads them
        if self.sees_crashes:
            faulthandler.enable(self.stack)
        # Afterwards the signals do what they would have done.
        self.interrupted = open(f"{path}.interrupted", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGINT, self.interrupted, chain=True)
        faulthandler.register(signal.SIGTERM, self.stack, chain=True)
        os.register_at_fork(after_in_child=self.forget)
        util.Finalize(None, self.stop, exitpriority=0)  # also in a process of multiprocessing
        self.exit, os._exit = os._exit, self.leave
        self.write()
        self.start()

    @harmless
    def forget(self):
        """Note nothing in a process that was forked from this one, unless it joins a group."""
        Rank.here = None
        os._exit = self.exit
        if self.sees_crashes:
            faulthandler.disable()
        for number in (ASK, signal.SIGINT, signal.SIGTERM):
            release(number)
        if self.recorder:
            self.recorder.forget()

    def run(self):
        """Note where the main thread is until this process ends."""
        looked = 0
        while not self.stopped.wait(0.001 if self.recorder and self.recorder.profiler else 0.1):
            frames = sys._current_frames()
            if self.recorder:
                self.recorder.note_line(frames.get(self.recorder.thread.ident))
            frame = frames.pop(threading.main_thread().ident, None)
            frames.clear()
            if time.time() - looked > 0.1:
                looked = time.time()
                self.note(frame)
            del frame  # it would keep what the script has deleted, such as DDP
            if given_up:
                self.path.unlink(missing_ok=True)
                return

    @harmless
    def note(self, frame):
        """Note since when the main thread has been at one place, and its last calls."""
        place = [(each.f_code, each.f_lasti) for each in outwards(frame)]
        busy = self.recorder and self.recorder.busy  # this is no work of the script
        if place != self.place or busy:
            self.place = place
            self.notes["since"] = time.time()
        if time.time() - self.written > 0.5:
            still = time.time() - self.notes["since"] > 1
            # To read them asks a GPU what is done, so it is left alone while the rank moves.
            calls = last_calls() if still or not torch.cuda.is_initialized() else []
            if calls and self.notes["calls"] not in ([], calls):  # a loop that is met in one line
                self.notes["since"] = max(self.notes["since"], self.written)
            self.notes |= {"calls": calls, "script": running() or self.notes["script"]}
            self.notes["stack"] = as_text((each, each.f_lineno) for each in outwards(frame))
            self.write()

    def write(self):
        """Write what is known of this rank, whole or not at all."""
        part = Path(f"{self.path}.{threading.get_ident()}")
        # The observer may have removed the folder, because it saw the end of the last rank.
        with contextlib.suppress(FileNotFoundError):
            part.write_text(json.dumps(self.notes))
            part.replace(self.path)
        self.written = time.time()

    def leave(self, status):
        """End the notes, and this process by os._exit()."""
        with contextlib.suppress(ValueError):  # only the main thread may set signals
            self.stop(SystemExit(status), sys._getframe(1))
        self.exit(status)

    def stop(self, error=None, frame=None):
        """End the notes, because the script has ended, perhaps by an error."""
        if Rank.here is not self or self.stopped.is_set():
            return  # this process was forked from it, or it has ended
        error = error or sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit) and error.__context__:
            error = error.__context__  # mp.spawn ends a rank that has failed by sys.exit()
        if error is self.earlier or not getattr(error, "code", True):  # sys.exit(0) is no error
            error = None
        # The profiler waits for a GPU, which may wait for a message that never comes.
        in_main = threading.current_thread() is threading.main_thread()
        if self.recorder and in_main and not (error and torch.cuda.is_initialized()):
            self.recorder.stop()
        self.stopped.set()
        self.join()
        self.note_end(error, frame)
        if given_up:
            self.path.unlink(missing_ok=True)
        os._exit = self.exit
        release(signal.SIGINT)  # not ASK, which would end the process then
        release(signal.SIGTERM)
        unlock(self.stack)

    @harmless
    def note_end(self, error, frame):
        """Note how this process ends. Without a group, there are no last calls any more."""
        self.notes |= {"end": "well", "calls": last_calls()}
        self.notes["why"] = self.recorder.why if self.recorder else ""
        if error:
            words = f"{type(error).__name__}: {error}"
            self.notes["end"] = words.split("\n")[0].removesuffix(": ")
            frames = [*traceback.walk_tb(error.__traceback__)][::-1]
            self.notes["stack"] = as_text(frames or [(x, x.f_lineno) for x in outwards(frame)])
        self.write()


def joins(rank, size, folder, record):
    """Note this process, which is about to join a group."""
    own = Rank.here or Rank(folder, record)
    if min(rank, size) >= 0:
        own.notes |= {"rank": rank, "size": size}
    own.notes |= {"joined": True, "called": True, "script": running()}
    own.write()
    if own.recorder:  # before the others wait for this rank, because the profiler starts slowly
        own.recorder.begin()


def has_joined():
    """Note that this process has joined a group."""
    own = Rank.here
    own.notes |= {"rank": dist.get_rank(), "size": dist.get_world_size()}
    own.write()


def release(number):
    """Write no stack at a signal any more. What the script does at it stays."""
    handler = signal.getsignal(number)
    if faulthandler.unregister(number) and handler is not None:
        signal.signal(number, handler)


def unlock(file):
    """Unlock a file, unless the script has closed all files, and its number may be another one."""
    with contextlib.suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_UN)


def outwards(frame):
    """Return a frame and those that have called it."""
    while frame:
        yield frame
        frame = frame.f_back


def as_text(frames):
    """Return frames and their lines as faulthandler writes them."""
    codes = [(frame.f_code, line) for frame, line in frames]
    return "\n".join(f'File "{c.co_filename}", line {line} in {c.co_name}' for c, line in codes)
