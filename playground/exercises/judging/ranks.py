"""Starts the ranks on which an answer is tried, watches them, and ends what they have started.

`with started(attempt, run, size) as go:` starts a process for each rank:

1. It is forked from a process that has imported torch and computed nothing, so this takes a few
   milliseconds. On other systems than Linux, it is a new Python, which takes seconds.
2. The ranks go through the same parts together: they join the group, they import the learner's
   file, and they run one case after another. A rank starts a part when all ranks have finished the
   part before. So the time of a part is counted from when all ranks are there.
3. A rank that fails, that ends, or that does not finish a part in time ends the run. It says by
   faulthandler at which line it is. This works in C++ code, too.

Nothing of the learner is imported here: only in the ranks.
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib.util
import io
import linecache
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

import common  # noqa: F401, it silences a warning that PyTorch 2.13 and 2.14 print in the ranks
from judging.traffic import Counting, Forbidden, Message

SECONDS_TO_JOIN = 30  # a busy machine may need many
GIGABYTE = 2**30
MEMORY = GIGABYTE  # what a rank may take in addition to what `import torch` has taken
FILE_SIZE = GIGABYTE // 10
PRINTED = 2000  # characters that are kept of what a rank prints
MESSAGES = 2000  # messages of a rank that are kept in a case
# The libraries of macOS may crash in a process that was forked.
context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")


@dataclass
class Crash:
    """An error in the learner's code, or the end of a rank.

    Attributes:
        error: the type and the text of the error.
        frames: the learner's own frames, as text.
        kind: "error", "forbidden", "your turn", "connection" (another rank has ended, so this one
            lost its connection) or "ended" (the process is gone).
    """

    error: str
    frames: list[str]
    kind: str = "error"


@dataclass
class Trial:
    """What happened in one part on all ranks, and what should have.

    Attributes:
        world_size: the number of ranks.
        messages: a list of Messages for each rank.
        results: what run() has returned on each rank; no entry if it did not return. A tuple has
            become a list.
        later: the results again, a moment after the function has returned, where they have changed.
        crashes: a Crash for each rank that has failed.
        places: for each rank that did not finish in time, where it is.
        verdict: "" (right), "WRONG", "COSTLY", "CRASH", "HANG" or "your turn".
        case: the arguments of the case, a dict.
        expected: what expected() has returned, for each rank.
        rank: the first rank at fault.
    """

    world_size: int
    messages: list[list[Message]]
    results: dict[int, object] = field(default_factory=dict)
    later: dict[int, object] = field(default_factory=dict)
    crashes: dict[int, Crash] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    verdict: str = ""
    case: dict = field(default_factory=dict)
    expected: dict[int, object] = field(default_factory=dict)
    rank: int = 0

    def of_rank(self):
        """Return what the rank at fault has, and what it should have."""
        return self.results[self.rank], self.expected[self.rank]


@dataclass
class Rank:
    """One rank, seen from the process that watches it."""

    number: int
    process: multiprocessing.Process
    connection: Connection
    output: Connection  # the end of a pipe, from which this process reads what the rank prints
    stack: Path  # where the rank writes its stack when it gets SIGUSR1
    printed: bytes = b""

    def read_output(self):
        """Read what the rank has printed, and keep its beginning. It must not wait to print."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(100):
                text = os.read(self.output.fileno(), 65536)
                if not text:
                    break
                self.printed += text[: PRINTED - len(self.printed)]

    def text(self):
        """Return the beginning of what the rank has printed."""
        return self.printed.decode(errors="replace")


@contextlib.contextmanager
def started(attempt, run, size):
    """Start the ranks of an attempt. At the end, end them and whatever they have started.

    Args:
        attempt: the Attempt. It gets what the ranks have printed.
        run: the check's function, called on each rank as run(the learner's function, **case).
        size: the number of ranks.

    Yields:
        a function that lets all ranks go through a part and returns a Trial. The parts are "join",
        "import", and (a number of attempt.load()'s functions, a number of attempt.cases).
    """
    port = free_port()
    ranks = []
    for number in range(size):
        ours, theirs = context.Pipe()
        output, write = context.Pipe(duplex=False)
        os.set_blocking(output.fileno(), False)
        stack = attempt.folder / f"stack{port}-{number}"
        settings = attempt, run, size, number, port
        process = context.Process(target=be_a_rank, args=(settings, theirs, write, stack))
        process.start()
        theirs.close()
        write.close()
        ranks.append(Rank(number, process, ours, output, stack))
    try:
        yield functools.partial(go_through, attempt, ranks)
    finally:
        end_children()
        for rank in ranks:
            rank.read_output()
            rank.output.close()
        attempt.printed = [rank.text() for rank in ranks]


def free_port():
    """Return a free port, below those that the system gives to connections and may give away."""
    while True:
        port = random.randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def go_through(attempt, ranks, part):
    """Let all ranks go through one part. Returns a Trial."""
    if isinstance(part, tuple):
        attempt.place_of(*part).mkdir(exist_ok=True)
    trial = Trial(len(ranks), [[] for _ in ranks])
    for rank in ranks:
        with contextlib.suppress(OSError):  # it has ended; this is noticed below
            rank.connection.send(part)
    waiting = {rank.number for rank in ranks}
    end = time.monotonic() + (SECONDS_TO_JOIN if part == "join" else attempt.seconds)
    while waiting and time.monotonic() < end:
        listen(ranks, waiting, trial, end - time.monotonic(), attempt.file)
        if trial.crashes:
            # The other ranks may fail for the same reason. This moment tells which rank was first.
            end = min(end, time.monotonic() + attempt.seconds_for_others)
    if waiting and not trial.crashes:
        trial.places = places([rank for rank in ranks if rank.number in waiting], attempt.file)
    return trial


def listen(ranks, waiting, trial, seconds, file):
    """Wait for the next news of the ranks, and note them in the Trial."""
    sources = []
    for rank in ranks:
        sources.append(rank.output)
        if rank.number in waiting:
            sources += [rank.connection, rank.process.sentinel]
    ready = wait(sources, min(seconds, 0.1))
    for rank in ranks:
        if rank.output in ready:
            rank.read_output()
        if rank.number not in waiting:
            continue
        with contextlib.suppress(EOFError, OSError):  # it has ended
            while rank.connection.poll():
                kind, news = rank.connection.recv()
                note(kind, news, rank.number, waiting, trial)
        if rank.number in waiting and rank.process.sentinel in ready:
            rank.process.join()
            rank.read_output()
            place = place_in(rank.stack, file)
            frames = [f"your {place}"] if place else []
            trial.crashes[rank.number] = Crash(ending(rank), frames, "ended")
            waiting.discard(rank.number)


def note(kind, news, rank, waiting, trial):
    """Note one message of a rank to the process that watches it."""
    if kind == "message":
        trial.messages[rank].append(news)
    elif kind == "crash":
        trial.crashes[rank] = news
        waiting.discard(rank)
    elif kind == "finished":
        waiting.discard(rank)
    else:
        # Only plain data is read, no objects of the learner.
        value = torch.load(io.BytesIO(news), weights_only=True)
        {"result": trial.results, "later": trial.later}[kind][rank] = value


def ending(rank):
    """Return how the process of a rank has ended, in words."""
    status = rank.process.exitcode
    sizes = re.search(r"op.preamble.length <= op.nbytes. (\d+) vs (\d+)", rank.text())
    if sizes:
        rank.printed = b""  # gloo has printed the same in its own words
        return f"its buffer has {sizes[2]} bytes, but the message that arrived has {sizes[1]}"
    if status is not None and status < 0:
        return f"its process was ended by {signal.Signals(-status).name}"
    return f"its process has ended with status {status}, in the middle of your function"


def places(ranks, file):
    """Ask ranks where they are. Returns for each number its line of the learner's file, as text."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    running = dict.fromkeys([rank.number for rank in ranks], 0)
    for _ in range(5):
        time.sleep(0.1)
        for rank in ranks:
            # "R": it computes, or would if a core were free. False where there is no /proc.
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{rank.process.pid}/stat").read_text()
                running[rank.number] += status.rsplit(")", 1)[1].split()[0] == "R"
    found = {}
    for rank in ranks:
        does = "computes" if running[rank.number] >= 3 else "waits"
        place = place_in(rank.stack, file)
        found[rank.number] = f"{does} at your {place}" if place else f"{does} outside your function"
    return found


def place_in(stack, file):
    """Return the innermost line of a file in a stack that faulthandler has written; "": none."""
    text = stack.read_text() if stack.exists() else ""
    name = file.encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
    for path, line in re.findall(r'File "(.*)", line (\d+) in ', text):
        if path == name:
            return f"line {line}: {linecache.getline(file, int(line)).strip()}"
    return ""


def be_a_rank(settings, connection, output, stack):
    """Go through the parts on one rank. Runs in a process of its own."""
    attempt, run, size, number, port = settings
    prepare_process(attempt, size, number, port, stack)
    # A process that the learner forks must not report as if it were this rank.
    os.register_at_fork(after_in_child=connection.close)
    functions = attempt.load() if attempt.load else []
    while True:
        part = connection.recv()
        try:
            if part == "join":
                if getattr(attempt.exercise, "JOIN", True):
                    meeting = f"file://{attempt.folder}/meet{port}"
                    timeout = timedelta(seconds=60)
                    dist.init_process_group("gloo", meeting, timeout, size, number)
                # From here on, what is printed is the learner's.
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            elif part == "import":
                functions = functions or [load_function(attempt)]
            else:
                run_case(attempt, run, functions[part[0]], part, number, connection)
        except BaseException as error:
            frames = own_frames(error, attempt.file)
            connection.send(("crash", Crash(describe(error), frames, kind_of(error))))
        sys.stdout.flush()
        connection.send(("finished", None))


def prepare_process(attempt, size, number, port, stack):
    """Limit what this process may take, and connect its output and its stack."""
    os.setsid()  # Ctrl-C in the terminal reaches only the check, which ends the ranks
    die_with_parent()
    file = open(stack, "w")  # noqa: SIM115, it stays open for SIGUSR1
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
    faulthandler.enable(file)  # C++ code may end the process by a signal
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit(resource.RLIMIT_FSIZE, FILE_SIZE)
    if sys.platform == "linux":
        status = Path("/proc/self/status").read_text()
        taken = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) * 1024
        limit(resource.RLIMIT_DATA, taken + MEMORY)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # gloo prints when it connects, and this is not the learner's
        os.dup2(nothing, stream)
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)  # noqa: SIM115
    os.environ["TMPDIR"] = str(attempt.folder)
    # What torchrun sets. A learner's program that joins by itself reads it.
    numbers = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def limit(what, most):
    """Set a limit of this process, unless the user has set a lower one."""
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))


def load_function(attempt):
    """Import the learner's file in this rank and return the function."""
    spec = importlib.util.spec_from_file_location("your_file", attempt.file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["your_file"] = module
    # Python itself finds the modules beside a file that it runs.
    sys.path.append(str(Path(attempt.file).parent))
    spec.loader.exec_module(module)
    if not hasattr(module, attempt.name):
        raise AttributeError(f"there is no {attempt.name} in {Path(attempt.file).name}")
    return getattr(module, attempt.name)


def run_case(attempt, run, function, part, number, connection):
    """Run one case in its folder and send what comes of it."""
    os.chdir(attempt.place_of(*part))
    name, case = list(attempt.exercise.CASES.items())[part[1]]
    count = 0

    def report(message):
        nonlocal count
        count += 1
        if count <= MESSAGES:
            connection.send(("message", message))

    only = getattr(attempt.exercise, "ONLY", None)
    instead = getattr(attempt.exercise, "INSTEAD", "")
    # In every second case the odd ranks are late, in the others the even ones.
    late = attempt.later > 0 and number % 2 == part[1] % 2
    with Counting(attempt.file, report, only, instead, late):
        result = run(function, **case)
        saved = save(result)
        connection.send(("result", saved))
        if attempt.later:
            time.sleep(attempt.later)
            later = save(result)
            if later != saved:
                connection.send(("later", later))


def save(result):
    """Return a result as bytes. It may have tensors, numbers, text, lists, tuples, dicts, None."""
    file = io.BytesIO()
    torch.save(plain(result), file)
    return file.getvalue()


def plain(value):
    """Return a value with everything replaced by text that is not plain data."""
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return f"an object of the class {type(value).__name__}"


def describe(error):
    """Return an error as text, without its stack."""
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    text = "\n".join(line[:200] for line in lines[:6])
    if isinstance(error, MemoryError) or "can't allocate memory" in text:
        text = text.split(":")[0] + f": a rank may use at most {MEMORY // GIGABYTE} GB"
    return text


def kind_of(error):
    """Return the kind of Crash that an error is."""
    if isinstance(error, Forbidden):
        return "forbidden"
    if isinstance(error, NotImplementedError) and str(error) == "your turn":
        return "your turn"
    if isinstance(error, (RuntimeError, dist.DistError)) and "gloo/" in str(error):
        return "connection"
    return "error"


def own_frames(error, file):
    """Return the frames of the learner's file in an error's traceback, as text."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == file:
            frames.append(f"your line {frame.lineno}, in {frame.name}: {frame.line}")
    if len(frames) > 4:
        frames = [*frames[:2], "...", *frames[-2:]]
    return frames


def die_with_parent():
    """Let this process end when its parent ends, also by SIGKILL. On Linux the kernel does it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    else:
        threading.Thread(target=end_after_parent, daemon=True).start()


def end_after_parent():
    """Wait until the parent has ended, and end this process."""
    multiprocessing.parent_process().join()
    os._exit(1)


def adopt_orphans():
    """Let the processes that the ranks have started become children of this one at a rank's end."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_children():
    """End all children of this process, and the children that it then gets from them."""
    while pids := children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def children():
    """Return the pids of the children of this process that are alive."""
    if sys.platform != "linux":
        return [process.pid for process in multiprocessing.active_children()]
    pids = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent, *fields = file.read_text().rsplit(")", 1)[1].split()
            # The first thread may have ended (Z) before the others, which keep the process's
            # children until they end, too.
            threads = int(fields[15])
            alive = state != "Z" or threads > 1
            if int(parent) == os.getpid() and alive:
                pids.append(int(file.parent.name))
    return pids
