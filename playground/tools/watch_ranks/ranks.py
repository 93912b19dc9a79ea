"""Calls a function on several ranks of this machine: what each returns, or where each one is.

call() is all that most need: it lets the ranks form a group, and returns what they return.
started() and news() are beneath it, for who wants to hear of the ranks while they run.

On Linux a rank is forked from this process, which takes milliseconds because PyTorch has been
imported; on other systems it is a new Python.
"""

import contextlib
import faulthandler
import linecache
import multiprocessing
import os
import pickle
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch._dynamo  # the first step of an optimizer imports it: here, before the ranks are forked
import torch.distributed as dist

from watch_ranks import runs

LOOK = 0.1  # seconds between two looks at the ranks
# How long the others may wait when a rank has failed: they may fail, too, or because of it.
AFTER_A_FAILURE = 0.3
# The libraries of macOS may crash in a process that was forked.
context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class Rank:
    """One rank, seen from the process that has started it.

    Attributes:
        number: from 0 on.
        process: its process.
        connection: what it sends comes here.
        stack: the file in which it writes its stack when it gets SIGUSR1, or crashes in C++.
    """

    number: int
    process: multiprocessing.Process
    connection: Connection
    stack: Path

    def computes(self) -> bool:
        """Return whether it computes now, or would if a core were free. Otherwise it waits."""
        try:
            return psutil.Process(self.process.pid).status() == psutil.STATUS_RUNNING
        except psutil.NoSuchProcess:
            return False

    def seconds(self) -> float:
        """Return for how long it has computed until now, in seconds of a core."""
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.NoSuchProcess:
            return 0.0
        return times.user + times.system

    def ask(self) -> str:
        """Let it write its stack. Returns whether it "waits" or "computes"."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        looks = []
        for _ in range(5):
            time.sleep(LOOK)
            looks.append(self.computes())
        return "computes" if sum(looks) >= 3 else "waits"

    def line_of(self, file: str) -> str:
        """Return the innermost line of a file in its stack, as text; "": there is none."""
        text = self.stack.read_text() if self.stack.exists() else ""
        name = file.encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
        for path, line in re.findall(r'File "(.*)", line (\d+) in ', text):
            if path == name:
                return f"line {line}: {linecache.getline(file, int(line)).strip()}"
        return ""


def call(
    function: Callable, world_size: int, *args: Any, group: bool = True, seconds: float = 120
) -> list:
    """Call function(rank, *args) on each rank. Returns what it returns, in the order of the ranks.

    Args:
        function: a function of a module.
        world_size: the number of ranks.
        args: its other arguments.
        group: whether the ranks form a group, with gloo.
        seconds: how long the ranks may wait, all of them at once. See news.

    Raises:
        RuntimeError: if a rank fails, with its traceback.
        TimeoutError: if the ranks wait for too long, with the line of each.
    """
    try:
        return _call_once(function, world_size, args, group, seconds)
    except RuntimeError as error:
        # On a busy machine, it happens that gloo's ranks do not reach each other at once.
        if "connectFullMesh failed" not in str(error):
            raise
    return _call_once(function, world_size, args, group, seconds)


def _call_once(function, world_size, args, group, seconds):
    """Do what call() does, with new processes."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        settings = function, args, f"file://{folder}/meet" if group else None, world_size
        with started(_call, world_size, Path(folder), *settings) as ranks:
            for rank, kind, value in news(ranks, seconds):
                if kind == "crash":
                    raise RuntimeError(f"rank {rank.number}: {value}")
                if kind == "ended":
                    raise RuntimeError(f"rank {rank.number}: its process has ended: {value}")
                results[rank.number] = pickle.loads(value)
            places = []
            for rank in ranks:
                if rank.number not in results:
                    does = rank.ask()
                    line = rank.line_of(function.__code__.co_filename)
                    places.append(f"rank {rank.number} {does} at {line}")
    if places:
        raise TimeoutError("\n".join(places))
    return [results[number] for number in range(world_size)]


def _call(number, connection, function, args, meeting, world_size):
    """Call the function as one of the ranks, and send what it returns, or why it fails."""
    torch.set_num_threads(1)
    try:
        if meeting:
            timeout = timedelta(minutes=5)
            dist.init_process_group("gloo", meeting, timeout, world_size, number)
        value = function(number, *args)
        if meeting:
            dist.destroy_process_group()
        connection.send(("finished", pickle.dumps(value)))
    except BaseException:
        connection.send(("crash", traceback.format_exc()))


def free_port() -> int:
    """Return a free port, below those that the system gives to connections and may give away."""
    while True:
        port = random.randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def started(function: Callable, world_size: int, folder: Path, *args: Any) -> Iterator[list[Rank]]:
    """Start a process for each rank. At the end, end them and what they have started.

    Args:
        function: called in each process as function(number, connection, *args). What it sends must
            be a pair of a text and a value, for news().
        world_size: the number of ranks.
        folder: for files, which have new names each time.
        args: further arguments of the function.
    """
    ranks = []
    beginning = os.urandom(4).hex()
    try:
        for number in range(world_size):
            ours, theirs = context.Pipe()
            stack = folder / f"stack{beginning}-{number}"
            settings = function, number, theirs, stack, args
            process = context.Process(target=_be_a_rank, args=settings)
            process.start()
            theirs.close()
            ranks.append(Rank(number, process, ours, stack))
        yield ranks
    finally:
        for rank in ranks:
            end(rank.process)


def end(process: multiprocessing.Process) -> None:
    """End a rank and what it has started: its children, and the processes of its session."""
    if process.is_alive():
        runs.end(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _be_a_rank(function, number, connection, stack, args):
    """Call the function in this process, which ends with the one that has started it."""
    os.setsid()  # Ctrl-C in the terminal reaches only the process that has started the ranks
    threading.Thread(target=_end_after_parent, daemon=True).start()
    file = open(stack, "w")  # noqa: SIM115, it stays open for the signal
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    faulthandler.enable(file)  # C++ code may end the process by a signal
    function(number, connection, *args)


def _end_after_parent():
    """Wait until the parent has ended, and end this process."""
    multiprocessing.parent_process().join()
    os._exit(1)


def news(ranks: list[Rank], seconds: float) -> Iterator[tuple[Rank, str, Any]]:
    """Yield (rank, kind, value) of what the ranks send, until each has sent "finished" or "crash".

    A rank whose process ends before that gives ("ended", its status).

    It also ends when all ranks that are left wait, and have sent nothing for some seconds, or when
    one of them has computed for so long. The time in which a rank computes, or would if a core were
    free, does not count as waiting. So it does not matter how busy the machine is.

    Args:
        ranks: what started() yields.
        seconds: how long the ranks may wait, and how long a rank may compute.
    """
    left = {rank.connection: rank for rank in ranks}
    before = {rank.number: rank.seconds() for rank in ranks}
    waited = 0.0
    most = seconds
    while left and waited < most:
        ready = wait(left, LOOK)
        if ready:
            waited = 0.0
        elif any(rank.computes() for rank in left.values()):
            if any(rank.seconds() - before[rank.number] > seconds for rank in left.values()):
                return
        else:
            waited += LOOK
        for connection in ready:
            rank = left[connection]
            try:
                kind, value = connection.recv()
            except (EOFError, OSError):
                rank.process.join()
                kind, value = "ended", rank.process.exitcode
            if kind in ("finished", "crash", "ended"):
                del left[connection]
            if kind in ("crash", "ended"):
                most = AFTER_A_FAILURE
            yield rank, kind, value
